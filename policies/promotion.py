"""The promotion rule: which finalist, if any, has proved itself against the incumbent.

A winner's gain has a confidence interval above zero and keeps every SLO and the quality floor; otherwise the
incumbent stays, which is a good answer. Rounds pair a finalist with the incumbent under the same traffic, each on a
fresh engine process, so the interval is over restarts: Student's t on the paired differences, two-sided, with the
confidence split over the finalists (Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

from trimtab.policies.constraints import broken, describe

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class RoundResult:
    """One round: scores turned so that larger is better, ``None`` where the measurement failed.

    ``constraints`` are the finalist's values in this round.
    """

    candidate: float | None
    incumbent: float | None
    constraints: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Gain:
    """Mean of the paired differences with its interval, in the score's unit; positive is better."""

    mean: float
    low: float
    high: float
    ratio: float | None  # mean gain over the incumbent's mean; None when that is 0
    num_rounds: int


@dataclass(frozen=True, slots=True)
class Standing:
    """How one finalist did. ``gain`` is ``None`` when fewer than two rounds could be paired."""

    configuration_id: str
    gain: Gain | None
    passed: bool
    sentence: str


@dataclass(frozen=True, slots=True)
class Promotion:
    """``winner_id`` is ``None`` for "keep the incumbent"."""

    winner_id: str | None
    sentence: str
    standings: tuple[Standing, ...]


def decide(rounds: Mapping[str, Sequence[RoundResult]], *, confidence: float = CONFIDENCE) -> Promotion:
    """Applies the rule to every finalist's rounds (keyed by configuration id).

    Among those that pass, the one with the largest mean gain wins.
    """
    if not rounds:
        return Promotion(None, "Keep the incumbent: no configuration was better in the search.", ())
    alpha = (1 - confidence) / len(rounds)
    standings = tuple(_standing(key, results, alpha) for key, results in rounds.items())
    passed = [s for s in standings if s.passed and s.gain is not None]
    if not passed:
        reasons = "; ".join(f"{s.configuration_id}: {s.sentence}" for s in standings)
        return Promotion(None, f"Keep the incumbent: no finalist proved itself ({reasons}).", standings)
    best = max(passed, key=lambda s: s.gain.mean if s.gain else -math.inf)
    return Promotion(best.configuration_id, f"Promote {best.configuration_id}: {best.sentence}.", standings)


def paired_gain(results: Sequence[RoundResult], alpha: float) -> Gain | None:
    """The t interval of ``candidate - incumbent`` over rounds; ``None`` with fewer than two complete rounds."""
    pairs = [(r.candidate, r.incumbent) for r in results if r.candidate is not None and r.incumbent is not None]
    n = len(pairs)
    if n < 2:
        return None
    differences = [c - i for c, i in pairs]
    mean = math.fsum(differences) / n
    deviation = math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / (n - 1))
    half = float(stats.t.ppf(1 - alpha / 2, n - 1)) * deviation / math.sqrt(n)
    base = abs(math.fsum(i for _, i in pairs) / n)
    return Gain(mean, mean - half, mean + half, mean / base if base else None, n)


def _standing(configuration_id: str, results: Sequence[RoundResult], alpha: float) -> Standing:
    gain = paired_gain(results, alpha)
    missed = sum(r.candidate is None or r.incumbent is None for r in results)
    if gain is None or missed:
        return Standing(configuration_id, gain, False, f"{missed} of {len(results)} rounds could not be measured")
    values = _mean_constraints(results)
    faults = broken(values)
    if faults:
        return Standing(configuration_id, gain, False, ", ".join(describe(n, values[n]) for n in faults))
    relative = f" ({gain.ratio:+.0%})" if gain.ratio is not None else ""
    told = (
        f"gain {gain.mean:.3g}{relative}, interval {gain.low:.3g} to {gain.high:.3g} over {gain.num_rounds} restarts"
    )
    if gain.low <= 0:
        return Standing(configuration_id, gain, False, f"{told}: not above zero")
    return Standing(configuration_id, gain, True, told)


def _mean_constraints(results: Sequence[RoundResult]) -> dict[str, float]:
    """Each constraint's mean over the rounds; one that any round lacks counts as missing (NaN, never kept)."""
    names = {name for r in results for name in r.constraints}
    if not names:
        return {"constraints": math.nan}
    return {name: math.fsum(r.constraints.get(name, math.nan) for r in results) / len(results) for name in names}
