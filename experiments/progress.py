"""What an experiment says while it runs. Typed events for whoever shows them; nothing here prints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trimtab.engine.contract import Configuration
from trimtab.experiments.trial import TrialOutcome


@dataclass(frozen=True, slots=True)
class SearchStarted:
    """``num_resumed`` trials were measured by earlier runs, ``num_requeued`` of them had been interrupted."""

    num_trials: int
    num_resumed: int
    num_requeued: int
    seconds_left: float


@dataclass(frozen=True, slots=True)
class TrialStarted:
    """``origin`` says who wanted it: default, incumbent, sampler or live."""

    number: int
    num_trials: int
    origin: str
    configuration: Configuration
    seconds_left: float


@dataclass(frozen=True, slots=True)
class TrialFinished:
    """``score`` is ``None`` after a failure."""

    number: int
    num_trials: int
    outcome: TrialOutcome
    score: float | None
    seconds_left: float


@dataclass(frozen=True, slots=True)
class SearchEnded:
    """``reason`` says which budget ended it."""

    reason: str
    num_measured: int


@dataclass(frozen=True, slots=True)
class ConfirmStarted:
    finalists: tuple[Configuration, ...]
    num_runs: int
    seconds_left: float


@dataclass(frozen=True, slots=True)
class ConfirmRunFinished:
    """``run`` counts from 1 over all rounds and configurations."""

    run: int
    num_runs: int
    round: int
    outcome: TrialOutcome
    score: float | None
    seconds_left: float


Event = SearchStarted | TrialStarted | TrialFinished | SearchEnded | ConfirmStarted | ConfirmRunFinished
Progress = Callable[[Event], None]
