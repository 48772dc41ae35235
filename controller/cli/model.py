"""``trimtab model``: fetch a model into the cache, list what there is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimtab.controller.cli.output import download_progress, on_interrupt, print_json, table
from trimtab.controller.settings import settings
from trimtab.engine import models

app = typer.Typer(no_args_is_help=True, help="Fetch models and list those that are there.")
DEFAULT_MODEL = "smollm2-135m-instruct"


def fetch_with_progress(name: str, cache: Path) -> Path:
    """Fetches ``name`` unless it is cached, showing progress on standard error. Raises ``ModelFetchError``."""
    cached = models.cached_path(name, cache)
    if cached is not None:
        return cached
    with on_interrupt("what has come is kept, the same command goes on from there"), download_progress() as progress:
        tasks: dict[str, object] = {}

        def report(phase: str, done: int, total: int | None) -> None:
            if phase not in tasks:
                tasks[phase] = progress.add_task(phase, total=total)
            progress.update(tasks[phase], completed=done, total=total)  # type: ignore[arg-type]

        return models.fetch(name, cache, report)


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="The model's name.")] = DEFAULT_MODEL,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Fetches a model into the cache; works without a network once it is there."""
    path = fetch_with_progress(name, settings().cache)
    if as_json:
        print_json({"name": name, "path": path})
    else:
        print(path)


@app.command("list")
def list_models(as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False) -> None:
    """Lists the models that `fetch` knows, and whether each is cached."""
    cache = settings().cache
    rows = [
        {"name": m.name, "license": m.license, "cached": models.cached_path(m.name, cache) is not None}
        for m in models.catalogue()
    ]
    if as_json:
        print_json(rows)
    else:
        table(
            ["NAME", "LICENSE", "CACHED"], [[r["name"], r["license"], "yes" if r["cached"] else "no"] for r in rows]
        )
