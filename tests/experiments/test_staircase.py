"""The staircase stops at the first step that breaks, and names the last one that held."""

import pytest

from trimtab.experiments.staircase import climb
from trimtab.policies.figures import LoadFigures, Percentiles
from trimtab.policies.manifest import SLO

BOUND = SLO.model_validate({"ttft": {"p95": "1s"}})
RATES = (1.0, 1.5, 2.25, 3.4, 5.0)


def step(rate_per_s: float, ttft_s: float | None, *, oversaturated: bool = False) -> LoadFigures:
    ttft = None if ttft_s is None else Percentiles(ttft_s, ttft_s, ttft_s, ttft_s, 10)
    return LoadFigures(rate_per_s, 10, 10, 0, 0, ttft, None, None, None, 1.0, rate_per_s, oversaturated)


@pytest.mark.parametrize(("capacity_per_s", "held_per_s", "num_steps"), [(1.2, 1.0, 2), (3.4, 3.4, 5)])
async def test_goodput_is_interpolated_between_the_step_that_held_and_the_one_that_broke(
    capacity_per_s: float, held_per_s: float, num_steps: int
) -> None:
    async def run(rate_per_s: float) -> LoadFigures:
        return step(rate_per_s, 0.5 if rate_per_s <= capacity_per_s else 2.0)

    stairs = await climb(run, RATES, BOUND)
    assert [s.rate_per_s for s in stairs.steps] == list(RATES[:num_steps])
    # excess -0.5 at the step that held and +1 at the one that broke: a third of the way
    broke_per_s = RATES[num_steps - 1]
    assert stairs.goodput_per_s == pytest.approx(held_per_s * (broke_per_s / held_per_s) ** (1 / 3))


@pytest.mark.parametrize(("capacity_per_s", "goodput_per_s", "num_steps"), [(0.4, 0.0, 2), (99.0, 5.0, 5)])
async def test_no_step_that_holds_is_no_goodput_and_all_steps_is_the_last(
    capacity_per_s: float, goodput_per_s: float, num_steps: int
) -> None:
    async def run(rate_per_s: float) -> LoadFigures:
        return step(rate_per_s, 0.5 if rate_per_s <= capacity_per_s else 2.0)

    stairs = await climb(run, RATES, BOUND)
    assert stairs.goodput_per_s == goodput_per_s
    assert len(stairs.steps) == num_steps


async def test_oversaturation_ends_the_climb_even_within_the_bounds() -> None:
    async def run(rate_per_s: float) -> LoadFigures:
        return step(rate_per_s, 0.5, oversaturated=rate_per_s > 1.5)

    assert (await climb(run, RATES, BOUND)).goodput_per_s == 1.5


async def test_a_step_without_a_latency_does_not_hold() -> None:
    async def run(rate_per_s: float) -> LoadFigures:
        return step(rate_per_s, None)

    assert (await climb(run, RATES, BOUND)).goodput_per_s == 0.0


async def test_below_the_recorded_rate_only_half_of_it_is_tried() -> None:
    async def run(rate_per_s: float) -> LoadFigures:
        return step(rate_per_s, 0.5 if rate_per_s <= 0.6 else 2.0)

    stairs = await climb(run, RATES, BOUND)
    assert [s.rate_per_s for s in stairs.steps] == [0.5, 1.0]
    assert stairs.recorded.rate_per_s == 1.0
    assert 0.5 < stairs.goodput_per_s < 1.0
