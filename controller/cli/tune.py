"""``trimtab tune``: search and report, with no controller around it; ``--plan`` only says what it would do."""

from __future__ import annotations

import asyncio
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from trimtab.controller.cli.client import ApiClient
from trimtab.controller.cli.lifecycle import Files
from trimtab.controller.cli.model import fetch_with_progress
from trimtab.controller.cli.output import err, on_interrupt, print_json, say
from trimtab.controller.presence import is_present, sole_controller
from trimtab.controller.settings import Settings, settings
from trimtab.controller.targets import read_manifests, target_and_policy
from trimtab.engine import models
from trimtab.engine.registry import catalogues
from trimtab.errors import ExperimentError

if TYPE_CHECKING:
    from trimtab.experiments.experiment import ExperimentResult
    from trimtab.experiments.plan import Estimate
    from trimtab.experiments.progress import Event

POLL_S = 0.5


class ProgressLine:
    """One line on standard error: what is being done, how far it is, and the time left."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"), console=err
        )
        self._task: TaskID = self._progress.add_task("starting", total=1.0, left="")
        self._last = ""

    def __enter__(self) -> ProgressLine:
        if err.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, progress: dict[str, Any]) -> None:
        left_s = progress["seconds_left"]
        left = "" if left_s is None else f"about {left_s / 60:.1f} min left"
        self._progress.update(self._task, description=progress["told"], completed=progress["done_ratio"], left=left)
        line = f"{progress['told']} {left}".strip()
        if not err.is_terminal and line != self._last:
            say(line)
        self._last = line


def tune(
    files: Files,
    plan: Annotated[
        bool, typer.Option("--plan", help="Only print trials, minutes and cores; start nothing.")
    ] = False,
    report: Annotated[
        Path | None, typer.Option(help="Where to write the Markdown report; default: print it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Searches the best configuration under a policy and reports; touches no user traffic."""
    where = settings()
    if plan:
        with TemporaryDirectory(prefix="trimtab-plan-") as home:  # a plan leaves no trace
            planned = asyncio.run(_estimate(replace(where, home=Path(home)), files))
        _print_plan(planned, as_json=as_json)
        return
    if is_present(where.home):
        raise ExperimentError(f"a controller runs in {where.home}; start its search with `trimtab experiment start`")
    target, _ = target_and_policy(read_manifests(files, catalogues()))
    if target.spec.model in {m.name for m in models.catalogue()}:
        fetch_with_progress(target.spec.model, where.cache)
    kept = "nothing that was finished is lost, the same command goes on from there"
    with on_interrupt(kept), sole_controller(where.home), ProgressLine() as line:
        result, written = asyncio.run(_search(where, files, line))
    if report is not None:
        shutil.copyfile(written, report)
    say(f"{result.sentence} Report: {report or written}")
    if as_json:
        print(result.to_json())
    elif report is None:
        print(written.read_text())


async def _estimate(where: Settings, files: list[Path]) -> Estimate:
    from trimtab.controller.wiring import open_bench
    from trimtab.experiments.plan import estimate

    async with open_bench(where, files) as bench:
        return estimate(bench.tuner.plan("plan"))


async def _search(where: Settings, files: list[Path], line: ProgressLine) -> tuple[ExperimentResult, Path]:
    from trimtab.controller.progress import told
    from trimtab.controller.wiring import open_bench

    def show(event: Event) -> None:
        line.show(told(event))

    async with open_bench(where, files) as bench:
        experiment_id = bench.tuner.unfinished() or bench.tuner.create("manual")
        result = await bench.tuner.run(experiment_id, show)
        return result, bench.tuner.report_path(experiment_id)


def _print_plan(plan: Estimate, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(plan))
        return
    minutes = plan.search_minutes + plan.confirm_minutes
    print(f"{plan.num_trials} trials and {plan.num_confirm_runs} confirmations at most, about {minutes:.0f} minutes")
    print(f"engine on cores {_cores(plan.engine_cpus)}, load client on cores {_cores(plan.client_cpus)}")
    print(f"knobs searched: {', '.join(plan.searched_knobs)}")
    for name, reason in plan.left_out.items():
        print(f"left out: {name}: {reason}")
    if plan.shared:
        print(f"shared: {plan.shared}")


def follow_experiment(api: ApiClient, experiment_id: int) -> dict[str, Any]:
    """Shows a controller's experiment until it ends, and returns it. Raises ``ExperimentError`` when it failed."""
    with ProgressLine() as line:
        while (experiment := api.get(f"/experiments/{experiment_id}"))["state"] == "running":
            if experiment["progress"]:
                line.show(experiment["progress"])
            time.sleep(POLL_S)
    if experiment["state"] == "failed":
        raise ExperimentError(f"experiment {experiment_id} failed: {experiment['reason']}")
    ended: dict[str, Any] = experiment
    return ended


def _cores(cpus: tuple[int, ...]) -> str:
    return ", ".join(map(str, cpus)) or "any"
