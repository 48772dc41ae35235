"""The study: Optuna's ask and tell over a storage that survives Ctrl-C and kill -9.

A lock on the experiment's folder is the lease: whoever holds it knows that every running trial belongs to a process
that has died, so it fails those with a reason and queues them again. A trial's whole outcome is written as one
attribute before Optuna is told, so a crash in between loses nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState
from pydantic import TypeAdapter

from trimtab.engine.contract import ChangeCost, Configuration, KnobValue
from trimtab.errors import ExperimentError
from trimtab.experiments.plan import ExperimentPlan
from trimtab.experiments.trial import FailureKind, Phase, TrialFailure, TrialOutcome
from trimtab.policies import objective
from trimtab.policies.figures import TrialFigures

_CONFIGURATION, _ORIGIN, _OUTCOME, _FINGERPRINT = "configuration", "origin", "outcome", "fingerprint"
_VALUES: TypeAdapter[dict[str, KnobValue]] = TypeAdapter(dict[str, KnobValue])
_MAX_STARTUP_TRIALS = 10  # Optuna's own default; short searches must leave room for the model


@dataclass(frozen=True, slots=True)
class Proposal:
    """A trial that was asked for. ``origin``: default, incumbent, default and incumbent, sampler or live."""

    number: int
    configuration: Configuration
    origin: str


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """A finished trial. ``duplicate_of`` is the number of the trial whose outcome it repeats, ``None`` if its own.

    ``score`` is ``None`` after a failure.
    """

    number: int
    origin: str
    outcome: TrialOutcome
    score: float | None
    duplicate_of: int | None

    @property
    def counts(self) -> bool:
        """Whether it used the budget: it was measured, or tried, for itself and to its end."""
        kind = self.outcome.failure.kind if self.outcome.failure else None
        return self.duplicate_of is None and kind not in (FailureKind.INTERRUPTED, FailureKind.QUALITY)


@dataclass(frozen=True, slots=True)
class _Stored:
    """The attribute that holds an outcome; a configuration is stored apart, by its canonical JSON."""

    figures: TrialFigures | None
    failure: TrialFailure | None
    constraints: dict[str, float]
    duration_s: float
    fresh_engine: bool
    score: float | None
    duplicate_of: int | None


_STORED = TypeAdapter(_Stored)


class Study:
    """One experiment's trials. Use as a context manager: the lock is held and the storage open inside it."""

    def __init__(self, plan: ExperimentPlan) -> None:
        self._plan = plan
        self._space = plan.space
        self._running: dict[int, optuna.Trial] = {}

    def __enter__(self) -> Study:
        """Raises ``ExperimentError`` when another process runs this study, or it belongs to another plan."""
        self._plan.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self._plan.folder / "study.lock")
        try:
            self._open()
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._storage.remove_session()
        self._storage.engine.dispose()
        os.close(self._lock)

    def recover(self) -> int:
        """Settles what a dead process left running; returns how many trials were queued again."""
        num_requeued = 0
        for frozen in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            trial = optuna.Trial(self._study, frozen._trial_id)
            if _OUTCOME in frozen.user_attrs:
                self._finish(trial, _STORED.validate_json(frozen.user_attrs[_OUTCOME]))
                continue
            num_requeued += self._interrupt(trial, frozen, "its process died")
        return num_requeued

    def seed(self, seeds: Sequence[tuple[str, Configuration]]) -> None:
        """Queues configurations to be measured first, each with who wants it, unless the study has them already."""
        known = {trial.user_attrs.get(_ORIGIN) for trial in self._study.get_trials(deepcopy=False)}
        for origin, configuration in seeds:
            if origin not in known:
                self._enqueue(configuration, origin)

    def queue_live(self, configuration: Configuration) -> None:
        """Queues a trial that keeps ``configuration``'s knobs but lets the sampler choose the live ones."""
        parameters = self._space.parameters(configuration)
        if parameters is not None:
            live = self._space.names_with_cost(ChangeCost.LIVE)
            fixed = {name: value for name, value in parameters.items() if name not in live}
            self._study.enqueue_trial(fixed, user_attrs={_ORIGIN: "live"})

    def ask(self) -> Proposal:
        """The next trial: what is queued first, then the sampler's."""
        trial = self._study.ask()
        given = trial.user_attrs.get(_CONFIGURATION)
        if given is None:
            configuration = self._space.suggest(_OptunaChooser(trial))
            trial.set_user_attr(_CONFIGURATION, configuration.canonical_json)
        else:
            configuration = self._configuration(given)
            if self._space.parameters(configuration) is not None:
                self._space.suggest(_OptunaChooser(trial))  # so that the sampler learns from it
        self._running[trial.number] = trial
        return Proposal(trial.number, configuration, trial.user_attrs.get(_ORIGIN, "sampler"))

    def tell(self, proposal: Proposal, outcome: TrialOutcome, *, duplicate_of: int | None = None) -> TrialRecord:
        """Records an outcome for good."""
        score = objective.score(self._plan.policy.objective, outcome.figures) if outcome.figures else None
        stored = _Stored(
            outcome.figures, outcome.failure, outcome.constraints, outcome.duration_s, outcome.fresh_engine,
            score, duplicate_of,
        )  # fmt: skip
        trial = self._running.pop(proposal.number)
        trial.set_user_attr(_OUTCOME, _STORED.dump_json(stored).decode())
        self._finish(trial, stored)
        return TrialRecord(proposal.number, proposal.origin, outcome, score, duplicate_of)

    def interrupt(self, proposal: Proposal, reason: str) -> None:
        """Fails a trial that was cut short and queues it again."""
        trial = self._running.pop(proposal.number)
        frozen = self._study.get_trials(deepcopy=False)[proposal.number]
        self._interrupt(trial, frozen, reason)

    def records(self) -> list[TrialRecord]:
        """Every finished trial, in the order of their numbers."""
        finished = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
        return [self._record(t) for t in self._study.get_trials(deepcopy=False, states=finished)]

    def _open(self) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        plan, spec = self._plan, self._plan.policy
        path = plan.folder / "study.db"
        _use_wal(path)
        self._storage = optuna.storages.RDBStorage(f"sqlite:///{path}")
        self._study = optuna.create_study(
            study_name=plan.name,
            storage=self._storage,
            direction=objective.direction(spec.objective),
            load_if_exists=True,
        )
        fingerprint = plan_fingerprint(plan)
        known = self._study.user_attrs.get(_FINGERPRINT)
        if known is None:
            self._study.set_user_attr(_FINGERPRINT, fingerprint)
        elif known != fingerprint:
            raise ExperimentError(
                f"the study in {plan.folder} belongs to another policy, workload, model or incumbent; "
                "give this experiment a folder of its own"
            )
        num_known = len(self._study.get_trials(deepcopy=False))
        num_startup = min(_MAX_STARTUP_TRIALS, max(3, spec.search.budget.trials // 3))
        # A resumed sampler that began with the same seed would propose the same again.
        self._study.sampler = optuna.samplers.TPESampler(seed=plan.seed + num_known, n_startup_trials=num_startup)

    def _enqueue(self, configuration: Configuration, origin: str) -> None:
        parameters: dict[str, Any] = dict(self._space.parameters(configuration) or {})
        attributes = {_CONFIGURATION: configuration.canonical_json, _ORIGIN: origin}
        self._study.enqueue_trial(parameters, user_attrs=attributes)

    def _interrupt(self, trial: optuna.Trial, frozen: FrozenTrial, reason: str) -> bool:
        """Returns whether it was queued again: one that had no knobs yet lost nothing."""
        attributes = frozen.user_attrs
        failure = TrialFailure(FailureKind.INTERRUPTED, Phase.LOAD, reason)
        stored = _Stored(None, failure, {}, 0.0, False, None, None)
        requeue = _CONFIGURATION in attributes or _ORIGIN in attributes
        if _CONFIGURATION in attributes:
            self._enqueue(self._configuration(attributes[_CONFIGURATION]), attributes.get(_ORIGIN, "sampler"))
        elif requeue:
            fixed = dict(frozen.system_attrs.get("fixed_params", {}))
            self._study.enqueue_trial(fixed, user_attrs={_ORIGIN: attributes[_ORIGIN]})
        trial.set_user_attr(_OUTCOME, _STORED.dump_json(stored).decode())
        self._finish(trial, stored)
        return requeue

    def _finish(self, trial: optuna.Trial, stored: _Stored) -> None:
        known = self._study.get_trials(deepcopy=False)[trial.number].constraints
        for name, value in stored.constraints.items():
            if name not in known:
                trial.set_constraint(name, value)
        if stored.score is None:
            # The sampler ignores a failed trial. It must learn from one without a score that is known to be
            # infeasible, or it proposes the same weights again and again.
            state = TrialState.PRUNED if stored.constraints else TrialState.FAIL
            self._study.tell(trial.number, state=state)
        else:
            self._study.tell(trial.number, stored.score)

    def _record(self, frozen: FrozenTrial) -> TrialRecord:
        stored = _STORED.validate_json(frozen.user_attrs[_OUTCOME])
        configuration = self._plan.incumbent
        if _CONFIGURATION in frozen.user_attrs:
            configuration = self._configuration(frozen.user_attrs[_CONFIGURATION])
        outcome = TrialOutcome(
            configuration, stored.figures, stored.failure, stored.constraints, stored.duration_s, stored.fresh_engine
        )
        origin = frozen.user_attrs.get(_ORIGIN, "sampler")
        return TrialRecord(frozen.number, origin, outcome, stored.score, stored.duplicate_of)

    def _configuration(self, canonical_json: str) -> Configuration:
        return self._plan.adapter.catalogue.configuration(_VALUES.validate_json(canonical_json))


@dataclass(frozen=True, slots=True)
class _OptunaChooser:
    """A trial as the search space asks it."""

    trial: optuna.Trial

    def suggest_int(self, name: str, low: int, high: int, *, log: bool = False) -> int:
        return self.trial.suggest_int(name, low, high, log=log)

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float:
        return self.trial.suggest_float(name, low, high, log=log)

    def suggest_categorical(self, name: str, choices: tuple[KnobValue, ...]) -> KnobValue:
        chosen = self.trial.suggest_categorical(name, choices)
        assert chosen is not None  # no choice is
        return chosen


def plan_fingerprint(plan: ExperimentPlan) -> str:
    """What must be the same for two runs to be one experiment. Budgets may change: that is how one goes on."""
    spec = plan.policy
    parts = (
        spec.objective.model_dump_json(),
        spec.slo.model_dump_json(),
        spec.quality.model_dump_json(),
        repr(plan.space.dimensions),
        spec.search.trial.model_dump_json(),
        plan.workload.describe(),
        plan.model.digest,
        plan.incumbent.id,
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _lock(path: Path) -> int:
    """A descriptor that holds the lock until it is closed or its process ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ExperimentError(
            f"another process runs the experiment in {path.parent}; wait for it or end it"
        ) from error
    return descriptor


def _use_wal(path: Path) -> None:
    """WAL is a property of the file, so once is enough: readers (``experiment show``) never block the search."""
    connection = sqlite3.connect(path)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
    finally:
        connection.close()
