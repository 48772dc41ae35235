"""``trimtab kernels``: compiles the engine's native kernels, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Annotated

import typer

from trimtab.controller.settings import settings

app = typer.Typer(no_args_is_help=True, help="The engine's native CPU kernels.")


@app.command()
def build(
    level: Annotated[str | None, typer.Option(help="avx512, avx2 or plain (default: the CPU's best)")] = None,
) -> None:
    """Compiles the kernels into the cache, as the engine would at its first start, and prints where they are."""
    folder = settings().cache / "kernels"
    argv = [sys.executable, "-m", "trimtab.kernels.cpu", "build", "--folder", str(folder)]
    result = subprocess.run(
        [*argv, *([] if level is None else ["--level", level])],
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        check=False,
    )
    raise typer.Exit(result.returncode)
