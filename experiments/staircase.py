"""Goodput by a rising staircase: the highest rate at which every SLO holds, inside one trial.

It begins at the recorded rate and has at most five steps, stopped at the first that breaks an SLO or oversaturates;
when the recorded rate itself breaks one, half of it is tried and no more. Between a step that held and the one that
broke, the rate at which the first broken bound would just be met is interpolated (linear in the bound's relative
excess, over the logarithm of the rate): five steps alone would make most configurations tie.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from trimtab.policies.constraints import broken, load_constraints
from trimtab.policies.figures import LoadFigures
from trimtab.policies.manifest import SLO

MAX_STEPS = 5
FALLBACK_RATIO = 0.5  # of the first step's rate


@dataclass(frozen=True, slots=True)
class Stairs:
    """The steps in the order of their rates; the last one broke an SLO unless all hold.

    ``recorded`` is the step at the recorded rate. ``goodput_per_s`` lies between the last step that held and the
    first that broke; 0: none holds.
    """

    steps: tuple[LoadFigures, ...]
    recorded: LoadFigures
    goodput_per_s: float


async def climb(
    run_step: Callable[[float], Awaitable[LoadFigures]], rates_per_s: Sequence[float], slo: SLO
) -> Stairs:
    """Calls ``run_step`` with one rate after another. ``rates_per_s`` rises from the recorded one; at most five."""
    assert 0 < len(rates_per_s) <= MAX_STEPS
    steps: list[LoadFigures] = []
    for rate_per_s in rates_per_s:
        steps.append(await run_step(rate_per_s))
        if broken(load_constraints(slo, steps[-1])):
            break
    else:
        return Stairs(tuple(steps), steps[0], rates_per_s[-1])
    recorded = steps[0]
    if len(steps) == 1:
        steps.insert(0, await run_step(rates_per_s[0] * FALLBACK_RATIO))
        if broken(load_constraints(slo, steps[0])):
            return Stairs(tuple(steps), recorded, 0.0)
    return Stairs(tuple(steps), recorded, _crossing_per_s(slo, steps[-2], steps[-1]))


def _crossing_per_s(slo: SLO, held: LoadFigures, broke: LoadFigures) -> float:
    """Where the first of the broken bounds is just met between two steps."""
    below, above = load_constraints(slo, held), load_constraints(slo, broke)
    # Oversaturation is yes or no: alone it leaves the rate that held.
    shares = [-below[n] / (above[n] - below[n]) if n != "oversaturation" else 0.0 for n in broken(above)]
    return float(held.rate_per_s * (broke.rate_per_s / held.rate_per_s) ** min(shares))
