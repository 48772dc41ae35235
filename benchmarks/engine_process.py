"""One real engine process for benchmarks that measure over HTTP: started, waited for and ended."""

from __future__ import annotations

import secrets
import signal
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from trimtab.engine.adapters.embedded import CATALOGUE, EmbeddedAdapter
from trimtab.engine.adapters.interface import Launch
from trimtab.engine.contract import KnobValue
from trimtab.engine.process import ProcessRecord, ProcessSpec, exit_code, spawn, terminate

MODEL_NAME = "benchmark"
_START_TIMEOUT_S = 60.0
_GRACE_S = 10.0


@contextmanager
def engine_process(model: Path, knobs: Mapping[str, KnobValue], cpu: int) -> Iterator[str]:
    """Serves ``model`` on one core and yields its base URL; the process is gone afterwards, also after SIGTERM."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    port, admin_port = _free_ports(2)
    launch = Launch(model, MODEL_NAME, CATALOGUE.configuration(knobs), port, admin_port, secrets.token_hex(16))
    command = EmbeddedAdapter().command(launch)
    with tempfile.TemporaryDirectory() as folder:
        log_path = Path(folder) / "engine.log"
        record = spawn(ProcessSpec(command.argv, command.env, (cpu,), log_path), lambda _: None)
        try:
            _wait_ready(f"http://127.0.0.1:{port}", record, log_path)
            yield f"http://127.0.0.1:{port}"
        finally:
            terminate(record, _GRACE_S)


def _wait_ready(base_url: str, record: ProcessRecord, log_path: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while exit_code(record) is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{base_url}/ready", timeout=2):
                return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.1)
    raise SystemExit(f"the engine did not become ready:\n{log_path.read_text()[-2000:]}")


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for sock in sockets:
        sock.bind(("127.0.0.1", 0))
    ports = [int(sock.getsockname()[1]) for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports
