"""Puts one engine process together, serves until it is told to stop, and drains.

``__main__`` calls ``run``; this is the process's composition root.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import structlog
import torch
import uvicorn
from starlette.types import ASGIApp

from trimtab.engine.embedded.admin import admin_app
from trimtab.engine.embedded.core import EngineCore, Telemetry
from trimtab.engine.embedded.engine_thread import EngineThread
from trimtab.engine.embedded.generation import Emission, GenerationRequest
from trimtab.engine.embedded.kernels import choose_kernels
from trimtab.engine.embedded.loader import LoadedModel, load_model
from trimtab.engine.embedded.memory import available_bytes
from trimtab.engine.embedded.metrics import EngineMetrics
from trimtab.engine.embedded.records import RecordRing
from trimtab.engine.embedded.sampling import SamplingParams
from trimtab.engine.embedded.server import traffic_app
from trimtab.engine.embedded.service import Gate, ServedModel, Service
from trimtab.engine.embedded.settings import ServeSettings
from trimtab.errors import KernelBuildError, KnobError, ModelError, TrimtabError

_KEEP_ALIVE_S = 75
_BACKLOG = 2048

_log = structlog.get_logger(__name__)


class ExitCode(IntEnum):
    """How the process ended."""

    OK = 0  # drained after SIGTERM or SIGINT
    USAGE = 2  # the command line, a knob or the environment is wrong
    MODEL = 3  # the model cannot be loaded
    PORT = 4  # a port cannot be bound
    MEMORY = 5  # the machine has less memory than was asked for
    ENGINE = 6  # the engine failed: in its first step, or for good
    CUT_SHORT = 7  # draining ended by a second signal or the time limit with requests still in flight


class StartError(TrimtabError):
    """The engine cannot start; the message is one line."""

    def __init__(self, code: ExitCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def run(settings: ServeSettings, started_s: float) -> ExitCode:
    """Serves until a signal. ``started_s`` is the monotonic time at which the process began.

    Raises:
        StartError: a port, the model or memory is not there.
    """
    with contextlib.ExitStack() as stack:
        traffic_socket = stack.enter_context(_bound(settings.host, settings.port))
        admin_socket = stack.enter_context(_bound(settings.admin_host, settings.admin_port))
        if settings.injection is not None:
            _log.warning("fault_injection", inject=settings.injection.label)
        torch.set_num_threads(int(settings.configuration["num_threads"]))
        loaded = _load(settings)
        _log.info("loaded", model=str(settings.model_path), kernels=loaded.model.kernels)
        telemetry = Telemetry(EngineMetrics(), RecordRing())
        core = _warm_core(settings, loaded)
        core.telemetry = telemetry
        model = ServedModel(
            settings.model_name,
            loaded.digest,
            loaded.model.config.max_context_tokens,
            loaded.tokenizer,
            int(time.time()),
        )
        service = Service(EngineThread(core), model, telemetry, Gate(), settings.max_queue, settings.injection)
        service.publish_info()
        core.report_load()
        service.engine.start()
        try:
            return asyncio.run(_serve(service, settings, Sockets(traffic_socket, admin_socket), started_s))
        finally:
            service.engine.stop()


@dataclass(frozen=True, slots=True)
class Sockets:
    """Bound before the model is loaded, so that a taken port is known at once."""

    traffic: socket.socket
    admin: socket.socket


class _QuietServer(uvicorn.Server):
    """A uvicorn server that leaves signals to us: two servers share this process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(service: Service, settings: ServeSettings, sockets: Sockets, started_s: float) -> ExitCode:
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    servers = [_server(traffic_app(service, settings.api_key)), _server(admin_app(service, settings.admin_token))]
    tasks = [
        asyncio.create_task(server.serve(sockets=[sock]))
        for server, sock in zip(servers, (sockets.traffic, sockets.admin), strict=True)
    ]
    while not all(server.started for server in servers):
        for task in tasks:
            if task.done():
                raise StartError(ExitCode.PORT, f"cannot listen: {task.exception() or 'the server stopped'}")
        await asyncio.sleep(0.01)
    _log.info(
        "ready",
        model=settings.model_name,
        url=f"http://{settings.host}:{settings.port}",
        configuration=settings.configuration.id,
        quantization=settings.configuration["quantization"],
        seconds_to_ready=round(time.monotonic() - started_s, 2),
    )
    await signals.get()
    code = await _drain(service, signals, settings.drain_timeout_s)
    for server in servers:
        server.should_exit = True
        server.force_exit = code is not ExitCode.OK
    await asyncio.gather(*tasks)
    _log.info("stopped", exit_code=int(code))
    return code


async def _drain(service: Service, signals: asyncio.Queue[int], timeout_s: float) -> ExitCode:
    """Refuses new requests and waits for those in flight, for the second signal or for the time limit."""
    gate = service.gate
    gate.terminating = True
    _log.info("draining", num_in_flight=gate.num_in_flight, timeout_s=timeout_s)
    deadline_s = time.monotonic() + timeout_s
    while gate.num_in_flight > 0:
        if not signals.empty() or time.monotonic() >= deadline_s:
            _log.warning("drain_cut_short", num_in_flight=gate.num_in_flight)
            return ExitCode.CUT_SHORT
        await asyncio.sleep(0.02)
    return ExitCode.ENGINE if service.engine.fatal is not None else ExitCode.OK


def _server(app: ASGIApp) -> _QuietServer:
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=5,
    )
    return _QuietServer(config)


@contextlib.contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            raise StartError(ExitCode.PORT, f"cannot listen on {host}:{port}: {error.strerror or error}") from error
        yield sock


def _load(settings: ServeSettings) -> LoadedModel:
    quantization, num_threads = (settings.configuration[name] for name in ("quantization", "num_threads"))
    try:
        kernels = choose_kernels(settings.kernels, settings.kernel_folder, int(num_threads))
        return load_model(settings.model_path, str(quantization), kernels)
    except KernelBuildError as error:
        raise StartError(ExitCode.USAGE, f"--kernels {settings.kernels}: {error}") from error
    except ModelError as error:
        raise StartError(ExitCode.MODEL, str(error)) from error
    except MemoryError as error:
        raise StartError(ExitCode.MEMORY, f"no memory for {settings.model_path}") from error


def _warm_core(settings: ServeSettings, loaded: LoadedModel) -> EngineCore:
    """Builds the core and runs one request through it, so that the first user pays for no first time."""
    wanted_bytes = int(settings.configuration["kv_cache_bytes"])
    free_bytes = available_bytes()
    if wanted_bytes > free_bytes:
        raise StartError(
            ExitCode.MEMORY,
            f"kv_cache_bytes is {wanted_bytes}, and {free_bytes} bytes of memory are available; lower it",
        )
    scratch = Telemetry(EngineMetrics(), RecordRing())
    try:
        core = EngineCore(loaded, settings.configuration, scratch, settings.injection, swap_file=settings.swap_file)
    except OSError as error:
        raise StartError(ExitCode.USAGE, f"--kv-swap-file {settings.swap_file}: {error.strerror or error}") from error
    except KnobError as error:
        raise StartError(ExitCode.USAGE, str(error)) from error
    except (MemoryError, RuntimeError) as error:
        raise StartError(ExitCode.MEMORY, f"cannot allocate the KV pool of {wanted_bytes} bytes: {error}") from error
    received: list[Emission] = []
    params = SamplingParams(max_output_tokens=2, temperature=0.0, ignore_eos=True, num_logprobs=1)
    now_s = time.monotonic()
    core.submit(GenerationRequest("warm-up", (0, 0), params, now_s, time.time(), received.append))
    try:
        while core.has_work:
            core.step()
    except RuntimeError as error:  # what torch raises for all that it cannot do
        raise StartError(ExitCode.ENGINE, f"the engine's first step failed: {error}") from error
    if not all(np.isfinite(e.scores.logprobs).all() for e in received if e.scores is not None):
        why = "its weights give log-probabilities that are not numbers: the file is corrupt; fetch it again"
        raise StartError(ExitCode.MODEL, f"{settings.model_path}: {why}")
    return core
