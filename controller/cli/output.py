"""How the command line speaks: results on standard output (JSON with ``--json``), all else on standard error."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

# Text is shown as it is: without these, "policy.yaml:100: …" would lose its line number to an emoji.
out = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
err = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)


def print_json(value: Any) -> None:
    """One JSON document, and nothing else, on standard output."""
    print(json.dumps(value, indent=2, default=str))


def say(text: str) -> None:
    """A line for people on standard error; markup in ``text`` is not read."""
    err.print(text)


@contextmanager
def on_interrupt(text: str) -> Iterator[None]:
    """Says ``text`` when Ctrl-C ends what is inside: what became of it, and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        say(f"trimtab: {text}")
        raise


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    shown = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        shown.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    out.print(shown)


def knobs(configuration: Mapping[str, Any]) -> str:
    """A configuration on one line."""
    return " ".join(f"{name}={value}" for name, value in configuration.items())


def download_progress() -> Progress:
    """A bar with bytes and the time left."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=err
    )
