"""``trimtab engine serve``: becomes the embedded engine's own process, so that torch is never imported here."""

from __future__ import annotations

import os
import sys

import typer

app = typer.Typer(no_args_is_help=True, help="Run the embedded engine by itself.")


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def serve(context: typer.Context) -> None:
    """Serves a model over HTTP; `trimtab engine serve --help` lists the engine's own options."""
    os.environ["PYTHONSAFEPATH"] = "1"
    argv = [sys.executable, "-m", "trimtab.engine.embedded", "serve", *context.args]
    os.execv(sys.executable, argv)  # noqa: S606  the same interpreter, our own module
