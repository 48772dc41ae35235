"""Runs experiments and the offline gate beside the loop, one at a time, and remembers their outcomes in the store.

A killed controller finds the experiment it was running and resumes it: the study keeps every finished trial.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from sqlalchemy import select
from sqlalchemy.orm import Session

import trimtab
from trimtab.controller.backends.trial_host import TrialHost
from trimtab.controller.cores import CoreSets
from trimtab.controller.model_facts import model_facts
from trimtab.controller.progress import told
from trimtab.controller.settings import Settings
from trimtab.controller.store.decisions import DecisionNote
from trimtab.controller.store.store import Store
from trimtab.controller.store.tables import ExperimentRow, GateRow, TargetRow
from trimtab.engine.adapters.interface import EngineAdapter
from trimtab.engine.contract import Configuration
from trimtab.errors import ExperimentError, TrimtabError
from trimtab.experiments.experiment import ExperimentResult, run_experiment
from trimtab.experiments.gate import check_configuration
from trimtab.experiments.memory import ModelFacts
from trimtab.experiments.plan import Devices, ExperimentPlan, Limits, hardware
from trimtab.experiments.progress import Event, Progress
from trimtab.experiments.workload.from_policy import build_workload
from trimtab.policies.constraints import broken
from trimtab.policies.manifest import EngineSpec, PolicySpec, TunedEngine, TuningPolicy

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class TunerParts:
    """What the tuner works with; ``controller.wiring`` supplies it."""

    store: Store
    target: str
    adapter: EngineAdapter
    host: TrialHost
    cores: CoreSets
    model_path: Path
    settings: Settings


@dataclass(frozen=True, slots=True)
class Winner:
    """A configuration that an experiment proved, its gate passed."""

    configuration: Configuration
    experiment_id: int


class Tuner:
    """The tuner of one target."""

    def __init__(self, parts: TunerParts) -> None:
        self._parts = parts
        self._task: asyncio.Task[None] | None = None
        self._facts: ModelFacts | None = None

    def is_busy(self) -> bool:
        return self._task is not None and not self._task.done()

    def start(self, trigger: str) -> int:
        """Starts an experiment in a task of its own and returns its id. Raises ``ExperimentError`` when busy."""
        self._refuse_when_busy()
        experiment_id = self.create(trigger)
        self._task = asyncio.create_task(self._run_told(self.run(experiment_id, self._keep_progress(experiment_id))))
        return experiment_id

    def start_gate(self, configuration: Configuration) -> None:
        """Starts the offline gate of ``configuration`` unless it has passed. Raises ``ExperimentError`` when busy."""
        known = self.gate(configuration.id)
        if known is not None and known.passed:
            return
        self._refuse_when_busy()
        self._task = asyncio.create_task(self._run_told(self._check(configuration)))

    def resume(self) -> None:
        """Goes on with the experiment that a killed controller left running."""
        left = self.unfinished()
        if left is not None:
            log.info("resuming an experiment", experiment=left)
            self._task = asyncio.create_task(self._run_told(self.run(left, self._keep_progress(left))))

    def unfinished(self) -> int | None:
        """The experiment that was interrupted or killed, if there is one; ``run`` resumes it."""
        with self._parts.store.read() as session:
            return session.scalars(select(ExperimentRow.id).where(ExperimentRow.state == "running")).first()

    async def interrupt(self) -> None:
        """Stops what runs; an experiment stays resumable."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def winner(self) -> Winner | None:
        """The winner of an experiment that nobody has acted on yet; it survives a kill."""
        with self._parts.store.read() as session:
            row = session.scalars(select(ExperimentRow).where(ExperimentRow.state == "won")).first()
        if row is None:
            return None
        values = ExperimentResult.from_json(json.dumps(row.result)).winner
        assert values is not None
        return Winner(values, row.id)

    def settle(self, winner: Winner, note: DecisionNote | None) -> None:
        """Marks the winner as acted on, with the decision behind it where no rollout tells it."""
        with self._parts.store.write(note) as session:
            session.get_one(ExperimentRow, winner.experiment_id).state = "finished"

    def gate(self, configuration_id: str) -> GateRow | None:
        """The newest gate of a configuration under the manifests in force, for this model, engine and hardware."""
        rows = select(GateRow).where(
            GateRow.target == self._parts.target,
            GateRow.configuration_id == configuration_id,
            GateRow.key == self._gate_key(),
        )
        with self._parts.store.read() as session:
            return session.scalars(rows.order_by(GateRow.id.desc()).limit(1)).first()

    def create(self, trigger: str) -> int:
        """Stores a new experiment and returns its id."""
        note = DecisionNote(
            "schedule" if trigger == "schedule" else "person",
            f"target {self._parts.target}",
            "experiment_started",
            f"An experiment was started ({trigger}).",
        )
        with self._parts.store.write(note) as session:
            row = ExperimentRow(
                target=self._parts.target,
                state="running",
                trigger=trigger,
                study="",
                progress=None,
                result=None,
                report_path=None,
                reason=None,
                started_unix_s=self._parts.store.now(),
                ended_unix_s=None,
            )
            session.add(row)
            session.flush()
            row.study = f"experiment-{row.id}"
            return row.id

    def plan(self, experiment_name: str) -> ExperimentPlan:
        """The plan of an experiment on the target's stable configuration.

        Raises:
            TrimtabError: the workload cannot be read, or the space does not suit the engine.
        """
        parts = self._parts
        row, target, policy = self._manifests()
        trial_cpus = parts.cores.trial or parts.cores.slots[1]
        return ExperimentPlan(
            name=experiment_name,
            policy=policy,
            adapter=parts.adapter,
            incumbent=parts.adapter.catalogue.configuration(row.stable_configuration),
            workload=build_workload(policy.workload, Path(row.manifest_folder)),
            model=self._model(),
            devices=Devices(trial_cpus, parts.cores.client, target.resources.memory, parts.cores.shared),
            folder=self._folder(experiment_name),
            quality_folder=parts.settings.cache / "quality",
            limits=Limits(
                stair_ratios=tuple(policy.search.trial.stairs), confirms_default=policy.search.confirm.default
            ),
        )

    async def run(self, experiment_id: int, progress: Progress) -> ExperimentResult:
        """Runs or resumes a stored experiment to its end, stores its outcome and returns it.

        Raises:
            TrimtabError: it cannot go on; the reason is stored. Cancellation leaves it resumable.
        """
        store = self._parts.store
        with store.read() as session:
            study = session.get_one(ExperimentRow, experiment_id).study
        try:
            result = await run_experiment(self.plan(study), self._parts.host, progress)
        except TrimtabError as error:
            self._end(experiment_id, "failed", str(error))
            raise
        except Exception as error:
            self._end(experiment_id, "failed", f"a fault of ours: {type(error).__name__}: {error}")
            raise
        self._end(experiment_id, "finished", result.sentence, result)
        return result

    def report_path(self, experiment_id: int) -> Path:
        """Where an experiment's Markdown report is once it has finished."""
        return self._folder(f"experiment-{experiment_id}") / "report.md"

    def _end(
        self,
        experiment_id: int,
        state: str,
        reason: str,
        result: ExperimentResult | None = None,
    ) -> None:
        note = DecisionNote("loop", f"experiment {experiment_id}", f"experiment_{state}", reason)
        with self._parts.store.write(note) as session:
            row = session.get_one(ExperimentRow, experiment_id)
            row.state, row.reason, row.ended_unix_s = state, reason, self._parts.store.now()
            if result is not None:
                self._keep_result(session, row, result)

    def _keep_result(self, session: Session, row: ExperimentRow, result: ExperimentResult) -> None:
        """Stores a result, and lets every trial that kept all constraints count as gated."""
        row.state = "won" if result.winner is not None else "finished"
        row.result = json.loads(result.to_json())
        row.report_path = str(self.report_path(row.id))
        for record in result.records:
            if record.duplicate_of is None and record.outcome.figures and not broken(record.outcome.constraints):
                kept = f"trial {record.number} of experiment {row.id} kept memory, quality and SLOs"
                session.add(self._gate_row(record.outcome.configuration, passed=True, reason=kept))

    async def _check(self, configuration: Configuration) -> None:
        outcome = await check_configuration(self.plan("gate"), self._parts.host, configuration)
        note = DecisionNote("loop", f"configuration {configuration.id}", "gate", outcome.sentence)
        with self._parts.store.write(note) as session:
            session.add(self._gate_row(configuration, passed=outcome.passed, reason=outcome.sentence))

    def _gate_row(self, configuration: Configuration, *, passed: bool, reason: str) -> GateRow:
        return GateRow(
            target=self._parts.target,
            configuration_id=configuration.id,
            key=self._gate_key(),
            passed=passed,
            detail={"reason": reason},
            checked_unix_s=self._parts.store.now(),
        )

    def _gate_key(self) -> str:
        """What an outcome belongs to: model, engine, hardware, the policy's demands and a replica's resources."""
        _, target, policy = self._manifests()
        demands = (policy.slo, policy.quality, policy.workload, policy.search.trial, target.resources)
        digest = hashlib.sha256("\n".join(part.model_dump_json() for part in demands).encode()).hexdigest()
        return f"{self._model().digest}/{trimtab.__version__}/{hardware()}/{digest}"

    def _manifests(self) -> tuple[TargetRow, EngineSpec, PolicySpec]:
        with self._parts.store.read() as session:
            row = session.get_one(TargetRow, self._parts.target)
        target, policy = (
            TunedEngine.model_validate(row.target_manifest),
            TuningPolicy.model_validate(row.policy_manifest),
        )
        return row, target.spec, policy.spec

    def _model(self) -> ModelFacts:
        if self._facts is None:
            self._facts = model_facts(self._parts.model_path, self._parts.model_path.stem)
        return self._facts

    def _folder(self, experiment_name: str) -> Path:
        return self._parts.settings.home / "experiments" / experiment_name

    def _keep_progress(self, experiment_id: int) -> Progress:
        def keep(event: Event) -> None:
            with self._parts.store.write() as session:
                session.get_one(ExperimentRow, experiment_id).progress = told(event)

        return keep

    async def _run_told(self, work: Coroutine[Any, Any, object]) -> None:
        """The edge of the task: what fails is stored by ``run`` and logged here, never lost in a task."""
        try:
            await work
        except TrimtabError as error:
            log.error("experiment or gate failed", error=str(error))
        except Exception:
            log.exception("a fault in an experiment or gate")

    def _refuse_when_busy(self) -> None:
        if self.is_busy():
            raise ExperimentError("an experiment or a check is running already; wait for its end")
