"""The confirmation: finalists and the incumbent again, on held-out traffic, over several engine restarts.

In each round every configuration gets a fresh engine and the same traffic, which no other round and no search saw;
the order within a round is random, so that slow drifts of the machine favour nobody. ``policies.promotion`` decides.
Runs are written down one by one, so an interrupted confirmation goes on where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter, ValidationError

from trimtab.engine.contract import Configuration
from trimtab.experiments.plan import ExperimentPlan
from trimtab.experiments.progress import ConfirmRunFinished, ConfirmStarted, Progress
from trimtab.experiments.study import TrialRecord
from trimtab.experiments.trial import TrialLoad, TrialOutcome, TrialRunner
from trimtab.policies import objective, promotion
from trimtab.policies.constraints import broken
from trimtab.policies.promotion import Promotion, RoundResult


@dataclass(frozen=True, slots=True)
class ConfirmRun:
    """One configuration in one round. ``score`` is ``None`` after a failure."""

    round: int
    outcome: TrialOutcome
    score: float | None


@dataclass(frozen=True, slots=True)
class Confirmation:
    """All runs and the decision. Empty runs: nothing was better in the search."""

    finalists: tuple[Configuration, ...]
    runs: tuple[ConfirmRun, ...]
    promotion: Promotion


_RUN = TypeAdapter(ConfirmRun)


def choose_finalists(plan: ExperimentPlan, records: Sequence[TrialRecord]) -> tuple[Configuration, ...]:
    """The best feasible trials that beat the incumbent's, best first.

    Equal scores go by headroom: the trial whose worst constraint is furthest from broken. An incumbent that failed
    or is infeasible itself bars nobody.
    """
    goal = plan.policy.objective
    feasible = [
        r for r in records if r.score is not None and r.duplicate_of is None and not broken(r.outcome.constraints)
    ]
    incumbents = [r for r in feasible if r.outcome.configuration == plan.incumbent and r.score is not None]
    bar = incumbents[0].score if incumbents else None

    def rank(record: TrialRecord) -> tuple[float, float]:
        assert record.score is not None
        latencies = [v for name, v in record.outcome.constraints.items() if name.startswith(("ttft", "tpot"))]
        return -objective.gain(goal, record.score, 0.0), max(latencies, default=0.0)

    better = [
        r
        for r in sorted(feasible, key=rank)
        if r.outcome.configuration != plan.incumbent
        and r.score is not None
        and (bar is None or objective.is_better(goal, r.score, bar))
    ]
    return tuple(r.outcome.configuration for r in better[: plan.policy.search.confirm.finalists])


async def confirm(
    plan: ExperimentPlan, runner: TrialRunner, finalists: Sequence[Configuration], progress: Progress
) -> Confirmation:
    """Runs or resumes the confirmation of ``finalists``."""
    if not finalists:
        return Confirmation((), (), promotion.decide({}))
    settings = plan.policy.search.confirm
    path = plan.folder / "confirm.jsonl"
    runs = [r for r in _read(path) if r.outcome.configuration in (plan.incumbent, *_contenders(plan, finalists))]
    turns = [(number, c) for number in range(settings.rounds) for c in _order(plan, finalists, number)]
    left = [t for t in turns if not any(r.round == t[0] and r.outcome.configuration == t[1] for r in runs)]
    progress(ConfirmStarted(tuple(finalists), len(turns), _seconds_left(plan, runs, len(left))))
    for done, (number, configuration) in enumerate(left, start=1):
        load = TrialLoad(plan.workload.held_out(number), settings.duration, plan.climbs_stairs)
        outcome = await runner.measure(configuration, load, label=f"confirmation, round {number + 1}", fresh=True)
        score = objective.score(plan.policy.objective, outcome.figures) if outcome.figures else None
        runs.append(ConfirmRun(number, outcome, score))
        _append(path, runs[-1])
        left_s = _seconds_left(plan, runs, len(left) - done)
        progress(ConfirmRunFinished(len(turns) - len(left) + done, len(turns), number + 1, outcome, score, left_s))
    await runner.close()
    rounds = {c.id: _rounds(plan, runs, c) for c in finalists}
    return Confirmation(tuple(finalists), tuple(runs), promotion.decide(rounds))


def _contenders(plan: ExperimentPlan, finalists: Sequence[Configuration]) -> list[Configuration]:
    """Who is measured beside the incumbent: the finalists, and the default for the report."""
    default = plan.adapter.catalogue.default()
    extra = plan.limits.confirms_default and default != plan.incumbent and default not in finalists
    return [*finalists, *([default] if extra else [])]


def _order(plan: ExperimentPlan, finalists: Sequence[Configuration], number: int) -> list[Configuration]:
    everyone = [plan.incumbent, *_contenders(plan, finalists)]
    order = np.random.default_rng([plan.seed, number]).permutation(len(everyone))
    return [everyone[i] for i in order]


def _rounds(plan: ExperimentPlan, runs: Sequence[ConfirmRun], candidate: Configuration) -> list[RoundResult]:
    """The finalist's rounds, with scores turned so that larger is better."""

    def turned(run: ConfirmRun) -> float | None:
        return None if run.score is None else objective.gain(plan.policy.objective, run.score, 0.0)

    by_key = {(r.round, r.outcome.configuration): r for r in runs}
    results = []
    for number in range(plan.policy.search.confirm.rounds):
        mine, other = by_key[number, candidate], by_key[number, plan.incumbent]
        results.append(RoundResult(turned(mine), turned(other), mine.outcome.constraints))
    return results


def _seconds_left(plan: ExperimentPlan, runs: Sequence[ConfirmRun], num_left: int) -> float:
    settings = plan.policy.search
    guess_s = 8.0 + settings.trial.warmup + settings.confirm.duration
    each_s = float(np.mean([r.outcome.duration_s for r in runs])) if runs else guess_s
    return num_left * each_s


def _append(path: Path, run: ConfirmRun) -> None:
    """Begins with a new line: one that a crash cut short before must not swallow this one."""
    with path.open("ab") as lines:
        lines.write(b"\n" + _RUN.dump_json(run) + b"\n")


def _read(path: Path) -> list[ConfirmRun]:
    """The runs written so far; a line cut short by a crash is a run that is measured again."""
    runs = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            runs.append(_RUN.validate_json(line))
        except ValidationError:
            continue
    return runs
