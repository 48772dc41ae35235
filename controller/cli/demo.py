"""``trimtab demo``: the whole loop in a few minutes, with a JSON report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimtab.controller.cli.output import print_json
from trimtab.controller.settings import settings


def demo(
    report: Annotated[Path, typer.Option(help="Where to write the report.")] = Path("demo-report.json"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Runs observe, search, confirm, canary, promote and roll back on a real model with real traffic."""
    from trimtab.controller.demo.demo import run_demo, told

    content = run_demo(settings(), report)
    if as_json:
        print_json(content)
        return
    print("\n".join(told(content)))
    print(f"wrote {report} and {report.with_suffix('.md')}")
