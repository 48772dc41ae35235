"""One experiment from plan to report: search, confirm, conclude. The controller and ``trimtab tune`` call it."""

from __future__ import annotations

import dataclasses
import os
import platform
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import optuna

import trimtab
from trimtab.experiments.confirm import Confirmation, choose_finalists, confirm
from trimtab.experiments.load.client_process import LoadClient
from trimtab.experiments.plan import ExperimentPlan
from trimtab.experiments.ports import EngineHost
from trimtab.experiments.progress import Progress
from trimtab.experiments.report import markdown
from trimtab.experiments.result import ExperimentResult, Setting
from trimtab.experiments.search import search
from trimtab.experiments.study import Study, TrialRecord
from trimtab.experiments.trial import TrialRunner
from trimtab.policies import objective

__all__ = ["ExperimentResult", "run_experiment"]


async def run_experiment(plan: ExperimentPlan, host: EngineHost, progress: Progress) -> ExperimentResult:
    """Runs the experiment, or resumes the one in the plan's folder. Cancelling it loses nothing.

    Writes ``result.json`` and ``report.md`` into the plan's folder.

    Raises:
        ExperimentError: another process runs it, the folder belongs to another plan, cores are shared against the
            policy, or the load client broke.
        KnobError: the policy's space does not suit the engine.
    """
    plan.refuse_silent_sharing()
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(LoadClient(plan.devices.client_cpus))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        study = stack.enter_context(Study(plan))
        runner = TrialRunner(plan, host, client, http)
        stack.push_async_callback(runner.close)
        records = await search(plan, runner, study, progress)
        finalists = choose_finalists(plan, records)
        confirmation = await confirm(plan, runner, finalists, progress)
    result = _conclude(plan, records, confirmation)
    _write(plan.folder, result)
    return result


def _conclude(plan: ExperimentPlan, records: list[TrialRecord], confirmation: Confirmation) -> ExperimentResult:
    winner_id = confirmation.promotion.winner_id
    result = ExperimentResult(
        setting=_setting(plan),
        incumbent=plan.incumbent,
        default=plan.adapter.catalogue.default(),
        records=tuple(records),
        confirmation=confirmation,
        winner=next((c for c in confirmation.finalists if c.id == winner_id), None),
        report="",
    )
    return dataclasses.replace(result, report=markdown(result))


def _setting(plan: ExperimentPlan) -> Setting:
    goal = plan.policy.objective
    return Setting(
        name=plan.name,
        objective=f"{objective.direction(goal)} {goal.metric}",
        unit=objective.unit(goal),
        workload=plan.workload.describe(),
        content_known=plan.workload.content_known,
        model=plan.model.name,
        model_digest=plan.model.digest,
        engine=plan.adapter.catalogue.engine,
        seed=plan.seed,
        shared=plan.devices.shared,
        left_out=dict(plan.space.left_out),
        versions={
            "trimtab": trimtab.__version__,
            "optuna": optuna.__version__,
            "python": platform.python_version(),
            "machine": plan.reference_key.hardware,
        },
    )


def _write(folder: Path, result: ExperimentResult) -> None:
    for name, text in (("result.json", result.to_json()), ("report.md", result.report)):
        part = folder / f"{name}.part"
        part.write_text(text, encoding="utf-8")
        os.replace(part, folder / name)
