"""A whole Trimtab for tests: the real controller process, Envoy, engine processes and a load client."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests

from trimtab.controller.cli.client import ApiClient
from trimtab.controller.cli.lifecycle import stop_everything
from trimtab.controller.presence import find, is_present
from trimtab.controller.settings import Settings
from trimtab.engine.process import NONCE_VARIABLE
from trimtab.errors import ControllerError

MANIFESTS = """
apiVersion: trimtab.dev/v1alpha1
kind: TuningPolicy
metadata: {{name: quick}}
spec:
  objective: {{maximize: goodput}}
  slo: {{ttft: {{p95: 5s}}, tpot: {{p95: 2s}}, errorRate: 1%}}
  quality: {{maxKL: 5, maxPerplexityIncrease: 500%}}
  search:
    space:
      max_num_seqs: {{low: 2, high: 16, log: true}}
    budget: {{trials: 3, duration: 2m, parallel: 1}}
    trial: {{warmup: 0s, duration: 2s}}
    confirm: {{finalists: 1, rounds: 2, duration: 2s}}
  workload:
    from: synthetic
    rate: 4/s
    promptTokens: {{median: 24, sigma: 0.2, max: 64}}
    outputTokens: {{median: 8, sigma: 0.2, max: 16}}
  rollout:
    steps: [{{weight: 30, detect: 400%}}, {{weight: 100}}]
    judge:
      confidence: 0.8
      margin: {{ttft: 300%, tpot: 200%}}
      window: 1s
      settle: 1s
      minRequests: {min_requests}
      maxImbalance: 90%
      maxDuration: {max_duration}
      onInconclusive: rollback
  share: true
---
apiVersion: trimtab.dev/v1alpha1
kind: TunedEngine
metadata: {{name: tiny}}
spec:
  policy: quick
  model: {model}
  port: {port}
  resources: {{cpus: 1, memory: 4GiB}}
  configuration: {{quantization: fp32, kv_cache_bytes: 33554432, max_num_seqs: 8}}
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Installation:
    """One home with its controller. ``home`` is short, because Envoy's admin is a Unix socket below it."""

    settings: Settings
    manifests: Path
    model: str
    url: str
    controllers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        """Starts a controller and waits for its API."""
        argv = [sys.executable, "-P", "-m", "trimtab.controller", "--file", str(self.manifests)]
        env = {**os.environ, "TRIMTAB_HOME": str(self.settings.home), "TRIMTAB_CACHE": str(self.settings.cache)}
        self.settings.logs.mkdir(parents=True, exist_ok=True)
        with (self.settings.logs / "controller.log").open("ab") as log:
            self.controllers.append(subprocess.Popen(argv, env=env, stdout=log, stderr=log, start_new_session=True))
        self.until(self.answers, "the controller does not answer")

    def answers(self) -> bool:
        try:
            self.api.get("/state")
        except ControllerError:
            return False
        return True

    @property
    def api(self) -> ApiClient:
        return ApiClient(self.settings)

    def kill_controller(self) -> None:
        """kill -9, as a crash would."""
        controller = self.controllers.pop()
        os.kill(find(self.settings.home).pid, signal.SIGKILL)
        controller.wait(10)
        assert not is_present(self.settings.home)

    def until(self, met: Callable[[], Any], told: str, timeout_s: float = 120.0) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (value := met()):
            if time.monotonic() > deadline:
                log = (self.settings.logs / "controller.log").read_text()[-3000:]
                raise AssertionError(f"{told} after {timeout_s:g} s\n{log}")
            time.sleep(0.03)
        return value

    def until_serving(self) -> None:
        self.until(lambda: self.api.get("/state")["target"]["serving"], "nothing serves")

    def start_rollout(self, knobs: dict[str, Any], inject: str | None = None) -> int:
        """Through the gate, like everybody."""
        gate = self.api.post("/gates", {"knobs": knobs})["configuration_id"]
        done = self.until(
            lambda: (g := self.api.get(f"/gates/{gate}"))["state"] != "running" and g, "the gate does not end"
        )
        assert done["state"] == "passed", done
        rollout_id: int = self.api.post("/rollouts", {"knobs": knobs, "inject": inject})["id"]
        return rollout_id

    def phase(self, rollout_id: int) -> str:
        phase: str = self.api.get(f"/rollouts/{rollout_id}")["phase"]
        return phase

    def until_phase(self, rollout_id: int, *phases: str) -> str:
        found: str = self.until(
            lambda: (p := self.phase(rollout_id)) in phases and p, f"rollout {rollout_id} is not {phases}"
        )
        return found

    def engine_pids(self) -> set[int]:
        """Every live process of this home that `engine.process` started and that is an engine, from /proc."""
        pids = set()
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                environment = (folder / "environ").read_bytes()
            except OSError:
                continue
            ours = str(self.settings.home).encode() in environment or self.model.encode() in b" ".join(words)
            if b"trimtab.engine.embedded" in words and ours and NONCE_VARIABLE.encode() in environment:
                pids.add(int(folder.name))
        return pids

    def canary_pid(self, rollout_id: int) -> int:
        return self._pid_of("SELECT canary_process_id FROM rollouts WHERE id = ?", rollout_id)

    def _pid_of(self, query: str, number: int) -> int:
        with sqlite3.connect(self.settings.home / "state.db") as store:
            (process_id,) = store.execute(query, (number,)).fetchone()
            (pid,) = store.execute("SELECT pid FROM processes WHERE id = ?", (process_id,)).fetchone()
        store.close()
        return int(pid)

    def envoy_pids(self) -> set[int]:
        with sqlite3.connect(self.settings.home / "state.db") as store:
            rows = store.execute("SELECT pid FROM processes WHERE role = 'envoy' AND ended_unix_s IS NULL").fetchall()
        store.close()
        return {int(pid) for (pid,) in rows}

    def chat_status(self) -> int | None:
        """The status of one chat request through Envoy; ``None`` while nothing listens."""
        body = {"model": self.model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        try:
            return requests.post(f"{self.url}/v1/chat/completions", json=body, timeout=30).status_code
        except requests.ConnectionError:
            return None

    def routes(self) -> dict[str, int]:
        """Envoy's weights by cluster, as Envoy itself has them."""
        transport = httpx.HTTPTransport(uds=str(self.settings.home / "envoy/admin.sock"))
        with httpx.Client(transport=transport) as http:
            dump = http.get("http://envoy/config_dump").json()
        (routes,) = [c for c in dump["configs"] if c["@type"].endswith(".RoutesConfigDump")]
        action = routes["dynamic_route_configs"][0]["route_config"]["virtual_hosts"][0]["routes"][0]["route"]
        return {c["name"]: c["weight"] for c in action["weighted_clusters"]["clusters"] if c.get("weight")}


@pytest.fixture
def install(tiny_model_dir: Path) -> Iterator[Callable[..., Installation]]:
    """Makes installations; everything they started is ended afterwards."""
    with installer(tiny_model_dir) as make:
        yield make


@pytest.fixture(scope="module")
def shared(tiny_model_dir: Path) -> Iterator[Installation]:
    """One installation for all tests of a module that leave it as they found it."""
    with installer(tiny_model_dir) as make:
        yield make()


@contextmanager
def installer(tiny_model_dir: Path) -> Iterator[Callable[..., Installation]]:
    made: list[Installation] = []

    def make(*, min_requests: int = 5, max_duration: str = "5m") -> Installation:
        home = Path(tempfile.mkdtemp(prefix="tt-"))
        port = free_port()
        manifests = home / "manifests.yaml"
        manifests.write_text(
            MANIFESTS.format(model=tiny_model_dir, port=port, min_requests=min_requests, max_duration=max_duration)
        )
        where = Settings(home, home / "cache", None)
        made.append(Installation(where, manifests, str(tiny_model_dir), f"http://127.0.0.1:{port}"))
        made[-1].start()
        made[-1].until_serving()
        return made[-1]

    yield make
    for one in made:
        for controller in one.controllers:
            controller.terminate()
            controller.wait(30)
        stop_everything(one.settings)
        left = one.engine_pids()
        shutil.rmtree(one.settings.home)
        assert not left, f"engine processes were left behind: {left}"


@dataclass
class Users:
    """A load client in its own process."""

    report: Path
    process: subprocess.Popen[bytes]

    def stop(self) -> dict[str, Any]:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        totals: dict[str, Any] = json.loads(self.report.read_text())
        return totals


@pytest.fixture
def users(tmp_path: Path) -> Iterator[Callable[[Installation], Users]]:
    """Starts users' traffic against an installation."""
    started: list[Users] = []

    def start(installation: Installation) -> Users:
        report = tmp_path / f"traffic-{len(started)}.json"
        argv = [sys.executable, "-P", "-m", "trimtab.experiments.load", "--url", installation.url]
        argv += ["--model", installation.model, "--json", str(report), "--rate", "4", "--duration", "600"]
        argv += ["--prompt-median", "24", "--prompt-max", "64", "--output-median", "8", "--output-max", "16"]
        started.append(Users(report, subprocess.Popen(argv)))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait(10)
