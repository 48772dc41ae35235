"""Goodput by a rising staircase: the highest rate at which every SLO holds, inside one trial.

At most five rates, each for the same time, stopped at the first step that breaks an SLO or oversaturates. Between the
last step that held and the first that did not, the rate at which the first broken bound would just be met is
interpolated (linear in the bound's relative excess, over the logarithm of the rate): five steps alone would make
most configurations tie.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from trimtab.policies.constraints import broken, load_constraints
from trimtab.policies.figures import LoadFigures
from trimtab.policies.manifest import SLO

MAX_STEPS = 5


@dataclass(frozen=True, slots=True)
class Stairs:
    """The steps that were climbed; the last one broke an SLO unless all hold.

    ``goodput_per_s`` lies between the last step that held and the first that broke; 0: none holds.
    """

    steps: tuple[LoadFigures, ...]
    goodput_per_s: float

    def at(self, rate_per_s: float) -> LoadFigures:
        """The step at ``rate_per_s``, or the one that broke below it."""
        return next((s for s in self.steps if s.rate_per_s >= rate_per_s), self.steps[-1])


async def climb(
    run_step: Callable[[float], Awaitable[LoadFigures]], rates_per_s: Sequence[float], slo: SLO
) -> Stairs:
    """Calls ``run_step`` with one rate after another. ``rates_per_s`` rises and has at most five."""
    assert 0 < len(rates_per_s) <= MAX_STEPS
    steps: list[LoadFigures] = []
    goodput_per_s = 0.0
    for rate_per_s in rates_per_s:
        steps.append(await run_step(rate_per_s))
        if broken(load_constraints(slo, steps[-1])):
            if len(steps) > 1:
                goodput_per_s = _crossing_per_s(slo, steps[-2], steps[-1])
            break
        goodput_per_s = rate_per_s
    return Stairs(tuple(steps), goodput_per_s)


def _crossing_per_s(slo: SLO, held: LoadFigures, broke: LoadFigures) -> float:
    """Where the first of the broken bounds is just met between two steps."""
    below, above = load_constraints(slo, held), load_constraints(slo, broke)
    # Oversaturation is yes or no: alone it leaves the rate that held.
    shares = [-below[n] / (above[n] - below[n]) if n != "oversaturation" else 0.0 for n in broken(above)]
    return float(held.rate_per_s * (broke.rate_per_s / held.rate_per_s) ** min(shares))
