"""The ``trimtab`` command: one Typer application, assembled from a file a group of commands.

Exit codes: 0 done; 1 refused or failed, with one line why; 2 wrong usage; 3 a rollout was rolled back; 4 a rollout
is under way (``rollout status``); 130 interrupted.
"""

from __future__ import annotations

import logging
import signal
import sys
from types import FrameType
from typing import NoReturn

import structlog
import typer

from trimtab.controller.cli import demo, doctor, engine, experiment, kernels, lifecycle, model, policy, rollout, tune
from trimtab.controller.cli.output import say
from trimtab.errors import TrimtabError

EXIT_INTERRUPTED = 130

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Trimtab tunes LLM inference engines: it searches, canaries and promotes their settings.",
)
lifecycle.add_to(app)
app.command("doctor")(doctor.doctor)
app.command("demo")(demo.demo)
app.command("tune")(tune.tune)
app.add_typer(policy.app, name="policy")
app.add_typer(model.app, name="model")
app.add_typer(engine.app, name="engine")
app.add_typer(kernels.app, name="kernels")
app.add_typer(experiment.app, name="experiment")
app.add_typer(rollout.app, name="rollout")


def main() -> None:
    """The process's edge: every error that Trimtab raises on purpose is one line and exit code 1."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    # A polite end cleans up like Ctrl-C: what a command started, it ends.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        app(prog_name="trimtab")
    except TrimtabError as error:
        say(f"trimtab: {error}")
        sys.exit(1)
    except SystemExit as left:
        if left.code == EXIT_INTERRUPTED:  # Typer turns Ctrl-C into this exit
            say("trimtab: interrupted")
        raise


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
