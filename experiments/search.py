"""The search: asks the study, measures, tells, until a budget is spent.

The incumbent and the default come first. After a start that paid, the sampler gets one more trial with the same
process, choosing among the live knobs only, because that trial costs no start.
"""

from __future__ import annotations

import asyncio
import statistics

from trimtab.engine.contract import ChangeCost, Configuration
from trimtab.experiments.plan import ExperimentPlan, estimate
from trimtab.experiments.progress import Progress, SearchEnded, SearchStarted, TrialFinished, TrialStarted
from trimtab.experiments.study import Proposal, Study, TrialRecord
from trimtab.experiments.trial import FailureKind, Phase, TrialFailure, TrialLoad, TrialOutcome, TrialRunner
from trimtab.policies.constraints import broken

MAX_REPEATS = 30  # proposals in a row that bring nothing new: the space is as good as exhausted


def seeds(plan: ExperimentPlan) -> list[tuple[str, Configuration]]:
    """What is measured before the sampler proposes anything."""
    default = plan.adapter.catalogue.default()
    if default == plan.incumbent:
        return [("default and incumbent", default)]
    return [("incumbent", plan.incumbent), ("default", default)]


async def search(plan: ExperimentPlan, runner: TrialRunner, study: Study, progress: Progress) -> list[TrialRecord]:
    """Runs or resumes the search and returns every finished trial. Cancellation loses nothing: call it again."""
    num_resumed = len(study.records())
    num_requeued = study.recover()
    study.seed(seeds(plan))
    budget = plan.policy.search.budget
    left_s = _seconds_left(plan, study.records())
    progress(SearchStarted(budget.trials, num_resumed, num_requeued, left_s))
    num_repeats = 0
    while (reason := _why_end(plan, study.records(), num_repeats)) is None:
        proposal = study.ask()
        known = _known_outcome(runner, study, proposal)
        if known is not None:
            study.tell(proposal, known[0], duplicate_of=known[1])
            num_repeats += 1
            continue
        num_repeats = 0
        record = await _measure(plan, runner, study, proposal, progress)
        if _is_worth_a_live_trial(plan, record):
            study.queue_live(record.outcome.configuration)
    records = study.records()
    progress(SearchEnded(reason, sum(r.counts for r in records)))
    return records


async def _measure(
    plan: ExperimentPlan, runner: TrialRunner, study: Study, proposal: Proposal, progress: Progress
) -> TrialRecord:
    records, num_trials = study.records(), plan.policy.search.budget.trials
    number = sum(r.counts for r in records) + 1
    left_s = _seconds_left(plan, records)
    progress(TrialStarted(number, num_trials, proposal.origin, proposal.configuration, left_s))
    try:
        load = TrialLoad(plan.workload, plan.policy.search.trial.duration, plan.climbs_stairs)
        outcome = await runner.measure(proposal.configuration, load, label=f"trial {proposal.number}")
    except asyncio.CancelledError:
        study.interrupt(proposal, "the search was interrupted")
        raise
    record = study.tell(proposal, outcome)
    left_s = _seconds_left(plan, study.records())
    progress(TrialFinished(number, num_trials, outcome, record.score, left_s))
    return record


def _known_outcome(runner: TrialRunner, study: Study, proposal: Proposal) -> tuple[TrialOutcome, int | None] | None:
    """The outcome of a proposal that need not be measured, and the trial that it repeats."""
    for record in study.records():
        if record.outcome.configuration == proposal.configuration and record.duplicate_of is None:
            kind = record.outcome.failure.kind if record.outcome.failure else None
            if kind not in (FailureKind.INTERRUPTED, FailureKind.CLIENT_LAG):
                return record.outcome, record.number
    constraints = runner.broken_quality(proposal.configuration)
    if constraints:
        failure = TrialFailure(FailureKind.QUALITY, Phase.CHECK, "these weights are known to break the quality floor")
        return TrialOutcome(proposal.configuration, None, failure, constraints, 0.0, False), None
    return None


def _is_worth_a_live_trial(plan: ExperimentPlan, record: TrialRecord) -> bool:
    """Whether a start should be used once more: it worked, and there are live knobs beside dearer ones to vary."""
    space = plan.space
    mixed = space.names_with_cost(ChangeCost.LIVE) and space.names_with_cost(
        ChangeCost.RESTART, ChangeCost.REQUANTIZE
    )
    quality_kept = not {"kl", "perplexity"} & set(broken(record.outcome.constraints))
    return bool(mixed) and record.outcome.fresh_engine and record.score is not None and quality_kept


def _why_end(plan: ExperimentPlan, records: list[TrialRecord], num_repeats: int) -> str | None:
    budget = plan.policy.search.budget
    counted = [r for r in records if r.counts]
    if len(counted) >= budget.trials:
        return f"the budget of {budget.trials} trials is spent"
    if num_repeats >= MAX_REPEATS:
        return f"{MAX_REPEATS} proposals in a row brought nothing new"
    spent_s = sum(r.outcome.duration_s for r in counted)
    next_s = statistics.median(r.outcome.duration_s for r in counted) if counted else 0.0
    seeded = len(counted) >= len(seeds(plan))
    if seeded and spent_s + next_s > budget.duration:
        return f"the budget of {budget.duration:g} s leaves no time for another trial"
    return None


def _seconds_left(plan: ExperimentPlan, records: list[TrialRecord]) -> float:
    """Of the search: by the trials so far, before them by the plan's estimate; never beyond the budget."""
    budget = plan.policy.search.budget
    counted = [r.outcome.duration_s for r in records if r.counts]
    if not counted:
        return estimate(plan).search_minutes * 60
    by_trials_s = (budget.trials - len(counted)) * statistics.fmean(counted)
    return max(0.0, min(by_trials_s, budget.duration - sum(counted)))
