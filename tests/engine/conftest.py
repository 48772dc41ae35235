"""The embedded engine for tests: stepped in this process, and as the real server process."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from trimtab.engine.adapters.embedded import ADMIN_TOKEN_VARIABLE, CATALOGUE
from trimtab.engine.contract import KnobValue
from trimtab.engine.embedded.core import Clock, EngineCore, Telemetry
from trimtab.engine.embedded.generation import Emission, FinishReason, GenerationRequest, Queueing
from trimtab.engine.embedded.inject import Injection
from trimtab.engine.embedded.loader import LoadedModel, load_model
from trimtab.engine.embedded.metrics import EngineMetrics
from trimtab.engine.embedded.records import RecordRing
from trimtab.engine.embedded.sampling import SamplingParams

MIB = 1024 * 1024
TOKEN = "a-token-for-tests"


@dataclass
class Heard:
    """Everything that one request's client received."""

    request: GenerationRequest
    emissions: list[Emission]

    @property
    def text(self) -> str:
        return "".join(e.text for e in self.emissions)

    @property
    def token_ids(self) -> list[int]:
        return [t for e in self.emissions for t in e.token_ids]

    @property
    def finish(self) -> FinishReason | None:
        return self.emissions[-1].finish if self.emissions else None


@dataclass
class Driver:
    """An engine core that the test steps itself."""

    core: EngineCore
    telemetry: Telemetry
    num_submitted: int = 0
    heard: list[Heard] = field(default_factory=list)

    def submit(self, prompt_ids: list[int], queueing: Queueing = Queueing(), **params: Any) -> Heard:  # noqa: B008  frozen
        emissions: list[Emission] = []
        sampling = SamplingParams(**({"max_output_tokens": 16, "temperature": 0.0} | params))
        name = f"request-{self.num_submitted}"
        request = GenerationRequest(
            name, tuple(prompt_ids), sampling, time.monotonic(), time.time(), emissions.append, queueing
        )
        self.num_submitted += 1
        self.core.submit(request)
        self.heard.append(Heard(request, emissions))
        return self.heard[-1]

    def run(self, max_steps: int = 20_000) -> None:
        for _ in range(max_steps):
            if not self.core.has_work:
                return
            self.core.step()
        raise AssertionError(f"still working after {max_steps} steps")


DriverMaker = Callable[..., Driver]


def drive(loaded: LoadedModel, injection: Injection | None = None, **knobs: KnobValue) -> Driver:
    telemetry = Telemetry(EngineMetrics(), RecordRing())
    configuration = CATALOGUE.configuration({"kv_cache_bytes": 16 * MIB, "quantization": "fp32"} | knobs)
    clock = Clock(sleep=lambda _: None)
    return Driver(EngineCore(loaded, configuration, telemetry, injection, clock), telemetry)


@pytest.fixture(scope="session")
def make_driver() -> DriverMaker:
    """Makes a core on any loaded model; keyword arguments are knobs."""
    return drive


@pytest.fixture(scope="session")
def tiny_loaded(tiny_model_dir: Path) -> LoadedModel:
    return load_model(tiny_model_dir, "fp32")


@pytest.fixture
def tiny_driver(tiny_loaded: LoadedModel) -> DriverMaker:
    """Makes cores on the tiny model in fp32; keyword arguments are knobs."""
    return lambda injection=None, **knobs: drive(tiny_loaded, injection, **knobs)


EngineRunner = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_engine(tiny_model_dir: Path) -> EngineRunner:
    """Runs an engine that should not start, to its end."""

    def run(*words: str, token: str) -> "subprocess.CompletedProcess[str]":
        command = engine_command(tiny_model_dir, *free_ports(2), *words)
        environment = engine_environment(token)
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    return run


@dataclass
class EngineProcess:
    """A real server process and clients of its two ports."""

    process: "subprocess.Popen[bytes]"
    log_path: Path
    http: httpx.Client
    admin: httpx.Client
    model_name: str

    @property
    def base_url(self) -> str:
        return str(self.http.base_url).rstrip("/")

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        body = {"model": self.model_name, "prompt": prompt} | fields
        response = self.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def metric(self, name: str) -> float:
        """The value of the one sample whose line starts with ``name``."""
        lines = [x for x in self.http.get("/metrics").text.splitlines() if x.startswith(name + " ")]
        assert len(lines) == 1, (name, lines)
        return float(lines[0].split()[-1])

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "the condition never held"
            time.sleep(0.01)

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


def free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for sock in sockets:
        sock.bind(("127.0.0.1", 0))
    ports = [int(sock.getsockname()[1]) for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def engine_command(model: Path, port: int, admin_port: int, *extra: str, **knobs: KnobValue) -> list[str]:
    values = {"kv_cache_bytes": 16 * MIB, "quantization": "fp32"} | knobs
    return [
        sys.executable, "-m", "trimtab.engine.embedded", "serve", "--model", str(model), "--model-name", "tiny",
        "--port", str(port), "--admin-port", str(admin_port), "--knobs", json.dumps(values), *extra,
    ]  # fmt: skip


def engine_environment(token: str = TOKEN) -> dict[str, str]:
    return {**os.environ, ADMIN_TOKEN_VARIABLE: token, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}


EngineStarter = Callable[..., EngineProcess]


@pytest.fixture(scope="session")
def start_engine(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineStarter]:
    """Starts engines on the tiny model; extra arguments are command-line words, keywords are knobs."""
    started: list[EngineProcess] = []

    def start(*extra: str, **knobs: KnobValue) -> EngineProcess:
        port, admin_port = free_ports(2)
        log_path = tmp_path_factory.mktemp("engine") / "log"
        with log_path.open("wb") as log:
            command = engine_command(tiny_model_dir, port, admin_port, *extra, **knobs)
            process = subprocess.Popen(command, stdout=log, stderr=log, env=engine_environment())
        http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        admin = httpx.Client(base_url=f"http://127.0.0.1:{admin_port}", headers=headers, timeout=60)
        engine = EngineProcess(process, log_path, http, admin, "tiny")
        started.append(engine)
        engine.wait_for(lambda: is_ready(engine), timeout_s=60)
        return engine

    yield start
    for engine in started:
        engine.http.close()
        engine.admin.close()
        if engine.process.poll() is None:
            engine.process.kill()
            engine.process.wait(10)


def is_ready(engine: EngineProcess) -> bool:
    assert engine.process.poll() is None, engine.log
    try:
        return engine.http.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def engine(start_engine: EngineStarter) -> Iterator[EngineProcess]:
    """One engine for a module's tests; it must drain cleanly at the end."""
    running = start_engine()
    yield running
    assert running.terminate() == 0, running.log
