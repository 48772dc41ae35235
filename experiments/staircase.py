"""Goodput by a rising staircase: the highest rate at which every SLO holds, inside one trial.

At most five rates, each for the same time, stopped at the first step that breaks an SLO or oversaturates.
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
    """The steps that were climbed; the last one broke an SLO unless all hold. ``goodput_per_s`` 0: none holds."""

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
            break
        goodput_per_s = rate_per_s
    return Stairs(tuple(steps), goodput_per_s)
