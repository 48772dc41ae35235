"""The controller's own process: ``python -m trimtab.controller --file MANIFEST …``, started by ``trimtab up``.

SIGTERM ends the loop and the console and leaves the replicas serving: the next controller adopts them.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog
import uvicorn

from trimtab.controller.console.access import Access
from trimtab.controller.console.app import create_app
from trimtab.controller.presence import Presence, announce, sole_controller
from trimtab.controller.settings import Settings, settings
from trimtab.controller.wiring import build_loop, open_bench
from trimtab.engine.process import own_record
from trimtab.errors import TrimtabError

log = structlog.get_logger(__name__)


async def run(where: Settings, files: list[Path]) -> None:
    """Runs the controller until SIGTERM or SIGINT. The caller holds the home's lock."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with open_bench(where, files) as bench:
        loop = build_loop(where, bench)
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", 0))
            listener.listen(128)  # connections wait from here on, so the file that names the port is never wrong
            port = listener.getsockname()[1]
            token = secrets.token_urlsafe(32)
            app = create_app(loop, Access(token, port))
            server = _Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1, lifespan="off"))
            serving = asyncio.create_task(server.serve([listener]))
            own = own_record()
            announce(where.home, Presence(own.pid, own.start_ticks, own.nonce, f"http://127.0.0.1:{port}", token))
            log.info("controller is up", url=f"http://127.0.0.1:{port}", home=str(where.home))
            try:
                await loop.run(stop)
            finally:
                server.should_exit = True
                await serving
    log.info("controller has ended; replicas go on serving")


class _Server(uvicorn.Server):
    """Leaves signals to ``run``."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trimtab.controller")
    parser.add_argument("--file", type=Path, action="append", required=True, dest="files")
    arguments = parser.parse_args()
    renderer = structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.dict_tracebacks,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    where = settings()
    os.umask(0o077)
    try:
        with sole_controller(where.home):
            asyncio.run(run(where, arguments.files))
    except TrimtabError as error:
        print(f"trimtab controller: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
