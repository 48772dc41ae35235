"""``python -m trimtab.engine.embedded serve``: one engine process. ``trimtab engine serve`` executes it.

Exit codes: 0 drained, 2 usage, 3 model, 4 port, 5 memory, 6 engine, 7 draining cut short (``serve.ExitCode``).
"""

from __future__ import annotations

import logging
import os
import sys
import time

import structlog

from trimtab.engine.embedded.settings import UsageError, read_settings


def main() -> int:
    """Returns the exit code. What prevents the start is one line on stderr."""
    started_s = time.monotonic()
    try:
        settings = read_settings(sys.argv[1:], os.environ)
    except UsageError as error:
        return _fail(2, str(error))
    _configure_logs()
    from trimtab.engine.embedded.serve import StartError, run

    try:
        return run(settings, started_s)
    except StartError as error:
        return _fail(error.code, str(error))


def _fail(code: int, message: str) -> int:
    print(f"trimtab engine: {' '.join(message.split())}", file=sys.stderr)
    return code


def _configure_logs() -> None:
    """JSON lines on stderr, or readable ones on a terminal; other libraries speak from warnings up."""
    terminal = sys.stderr.isatty()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            *([] if terminal else [structlog.processors.format_exc_info]),
            structlog.dev.ConsoleRenderer() if terminal else structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
