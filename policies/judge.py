"""The first judge: compares canary and baseline window by window and folds the checks into a decision.

A pure function of per-request records; the rollout calls it after every look and acts on the decision. Latencies are
compared as paired differences of mean logarithms, one a window, so shocks that hit both arms cancel. Missing data is
inconclusive and never a pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from trimtab.engine.contract import RequestOutcome, RequestRecord
from trimtab.policies.manifest import JudgeSettings, Rollout
from trimtab.policies.stats.confidence_sequence import Interval, mean_interval
from trimtab.policies.stats.error_split import log_e_value

NUM_CHECKS = 3


class CheckResult(StrEnum):
    PASS = "pass"  # harm of the size that the step must detect is ruled out
    FAIL = "fail"  # harm beyond the margin is shown
    INCONCLUSIVE = "inconclusive"  # not enough evidence yet, or none
    ERROR = "error"  # the figures could not be had


class Decision(StrEnum):
    PROMOTE = "promote"  # the step may be left
    ROLLBACK = "rollback"
    CONTINUE = "continue"  # evidence still grows
    INCONCLUSIVE = "inconclusive"  # evidence is missing or cannot be compared


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison. ``ratio`` and its interval are canary over baseline; ``None`` where there is none."""

    metric: str
    result: CheckResult
    reason: str
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judge's decision, the checks that it folds, and a sentence with numbers."""

    decision: Decision
    sentence: str
    checks: tuple[Check, ...]
    num_canary: int
    num_baseline: int
    num_windows: int


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at a step sees. Times are Unix seconds; ``since_unix_s`` lies after the settling time.

    ``canary`` and ``baseline`` are ``None`` when the arm's records could not be read.
    """

    step: int
    since_unix_s: float
    until_unix_s: float
    canary: Sequence[RequestRecord] | None
    baseline: Sequence[RequestRecord] | None


def judge(rollout: Rollout, look: Look) -> Verdict:
    """Judges the step ``look.step`` of ``rollout``."""
    if look.canary is None or look.baseline is None:
        arm = "canary" if look.canary is None else "baseline"
        check = Check("records", CheckResult.ERROR, f"the {arm}'s records could not be read")
        return Verdict(Decision.INCONCLUSIVE, f"Inconclusive: {check.reason}.", (check,), 0, 0, 0)
    settings = rollout.judge
    pairs = _windows(look, settings.window)
    canary = [r for pair in pairs for r in pair[0]]
    baseline = [r for pair in pairs for r in pair[1]]
    too_few = _too_few(settings, canary, baseline)
    blocked = too_few or _unequal(settings, canary, baseline)
    num_compared_steps = max(1, len(rollout.steps) - 1)
    alpha = (1 - settings.confidence) / (NUM_CHECKS * num_compared_steps)
    detect = rollout.steps[look.step].detect
    limits = {"ttft": settings.margin.ttft, "tpot": settings.margin.tpot}
    figures: Mapping[str, Callable[[RequestRecord], float | None]] = {
        "ttft": lambda r: r.ttft_s,
        "tpot": lambda r: r.tpot_s,
    }
    checks = [
        _latency_check(metric, [_log_ratio(pair, figure) for pair in pairs], (limits[metric], detect, alpha))
        for metric, figure in figures.items()
    ]
    checks.append(_error_check(canary, baseline, (settings.margin.errors, alpha)))
    if blocked:
        # A canary that does harm finishes less, and so unbalances the arms: unequal load holds back passes only.
        checks = [c if c.result is CheckResult.FAIL and not too_few else _held_back(c, blocked) for c in checks]
    return _fold(checks, (len(canary), len(baseline), len(pairs)), blocked)


_Pair = tuple[list[RequestRecord], list[RequestRecord]]


def _windows(look: Look, window_s: float) -> list[_Pair]:
    """Complete windows, by the time a request finished, as (canary's, baseline's) records."""
    num_windows = int((look.until_unix_s - look.since_unix_s) / window_s)
    pairs: list[_Pair] = [([], []) for _ in range(max(0, num_windows))]
    for arm, records in enumerate((look.canary or (), look.baseline or ())):
        for record in records:
            index = math.floor((record.finished_unix_s - look.since_unix_s) / window_s)
            if 0 <= index < len(pairs) and record.outcome is not RequestOutcome.CANCELLED:
                pairs[index][arm].append(record)
    return pairs


_Records = Sequence[RequestRecord]


def _too_few(settings: JudgeSettings, canary: _Records, baseline: _Records) -> str | None:
    if min(len(canary), len(baseline)) >= settings.minRequests:
        return None
    return f"{len(canary)} canary and {len(baseline)} baseline requests, of the {settings.minRequests} needed each"


def _unequal(settings: JudgeSettings, canary: _Records, baseline: _Records) -> str | None:
    tokens = [sum(r.prompt_tokens + r.output_tokens for r in arm) for arm in (canary, baseline)]
    imbalance = abs(tokens[0] - tokens[1]) / max(1, *tokens)
    if imbalance <= settings.maxImbalance:
        return None
    return f"the arms' tokens differ by {imbalance:.0%}, more than {settings.maxImbalance:.0%}"


def _log_ratio(pair: _Pair, figure: Callable[[RequestRecord], float | None]) -> float | None:
    """Mean log figure of the canary minus the baseline's; ``None`` when an arm has none in this window."""
    means = []
    for arm in pair:
        logs = [math.log(value) for r in arm if (value := figure(r)) is not None and value > 0]
        if not logs:
            return None
        means.append(math.fsum(logs) / len(logs))
    return means[0] - means[1]


def _latency_check(
    metric: str, differences: Sequence[float | None], limits: tuple[float, float | None, float]
) -> Check:
    margin, detect, alpha = limits
    seen = [d for d in differences if d is not None]
    if not seen:
        return Check(metric, CheckResult.INCONCLUSIVE, f"no window has a {metric.upper()} from both arms")
    interval = mean_interval(seen, alpha)
    low, high = _exp(interval.low), _exp(interval.high)
    ratio = math.exp(interval.mean)
    told = _told(metric, ratio, interval)
    if low > 1 + margin:
        return Check(metric, CheckResult.FAIL, f"{told}, beyond the margin of {margin:.0%}", ratio, low, high)
    allowed = max(margin, detect or 0.0)
    if high < 1 + allowed:
        return Check(metric, CheckResult.PASS, f"{told}: a rise of {allowed:.0%} is ruled out", ratio, low, high)
    reason = f"{told}: a rise of {allowed:.0%} is neither shown nor ruled out"
    return Check(metric, CheckResult.INCONCLUSIVE, reason, ratio, low, high)


def _told(metric: str, ratio: float, interval: Interval) -> str:
    low, high = _exp(interval.low), _exp(interval.high)
    span = f"{low:.2f} to {high:.2f}" if math.isfinite(high) else "unbounded"
    return (
        f"{metric.upper()} of the canary is {ratio:.2f} times the baseline's"
        f" (interval {span}, {interval.num_observations} windows)"
    )


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0)) if value != math.inf else math.inf


def _error_check(
    canary: Sequence[RequestRecord], baseline: Sequence[RequestRecord], limits: tuple[float, float]
) -> Check:
    """Harm is shown by the e-value. More errors than the margin allows never pass, however few the requests."""
    margin, alpha = limits
    if not canary or not baseline:
        return Check("errors", CheckResult.INCONCLUSIVE, "an arm has no requests")
    bad = [sum(r.outcome in (RequestOutcome.FAILED, RequestOutcome.REFUSED) for r in a) for a in (canary, baseline)]
    share = len(canary) / (len(canary) + len(baseline))
    told = f"errors: canary {bad[0]} of {len(canary)}, baseline {bad[1]} of {len(baseline)}"
    rise = bad[0] / len(canary) - bad[1] / len(baseline)
    if rise > 0 and log_e_value(bad[0], bad[1], share) >= -math.log(alpha):
        return Check("errors", CheckResult.FAIL, told)
    if rise > margin:
        reason = f"{told}: a rise beyond the margin of {margin:.1%} is not ruled out"
        return Check("errors", CheckResult.INCONCLUSIVE, reason)
    return Check("errors", CheckResult.PASS, told)


def _held_back(check: Check, reason: str) -> Check:
    return Check(check.metric, CheckResult.INCONCLUSIVE, reason, check.ratio, check.ratio_low, check.ratio_high)


def _fold(checks: Sequence[Check], counts: tuple[int, int, int], blocked: str | None) -> Verdict:
    """Any fail rolls back; all pass promotes; else evidence grows, or cannot be compared."""
    failed = [c for c in checks if c.result is CheckResult.FAIL]
    open_ = [c for c in checks if c.result is not CheckResult.PASS]
    requests = f"{counts[0]} and {counts[1]} requests"
    if failed:
        decision, sentence = Decision.ROLLBACK, f"Roll back: {'; '.join(c.reason for c in failed)}; {requests}."
    elif not open_:
        decision, sentence = Decision.PROMOTE, f"Promote: {'; '.join(c.reason for c in checks)}; {requests}."
    elif blocked:
        decision, sentence = Decision.INCONCLUSIVE, f"Inconclusive: {blocked}."
    else:
        decision, sentence = Decision.CONTINUE, f"Continue: {'; '.join(c.reason for c in open_)}; {requests}."
    return Verdict(decision, sentence, tuple(checks), *counts)
