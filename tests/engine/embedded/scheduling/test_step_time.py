"""The model of step times, taught by steps whose true cost is known."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.engine.embedded.scheduling.step_time import StepTimeModel

PAIR_S = 2e-6


def true_s(num_rows: int, num_pairs: int) -> float:
    """Reading the weights takes 10 ms; past 16 rows arithmetic takes longer than that."""
    return max(0.010, 0.000_6 * num_rows) + PAIR_S * num_pairs


def taught(num_steps: int, rng: random.Random, noise: float = 0.0) -> StepTimeModel:
    model = StepTimeModel()
    for _ in range(num_steps):
        num_rows = round(2 ** rng.uniform(0, 8))
        num_pairs = num_rows * rng.randint(10, 800)
        model.observe(num_rows, num_pairs, true_s(num_rows, num_pairs) * rng.uniform(1 - noise, 1 + noise))
    return model


def test_nothing_is_predicted_before_the_first_step() -> None:
    assert StepTimeModel().predict(1, 100) is None


@pytest.mark.parametrize("num_rows", [1, 7, 16, 40, 128, 250])
@pytest.mark.parametrize("mean_pairs", [50, 400])
def test_rows_and_attention_are_told_apart(num_rows: int, mean_pairs: int) -> None:
    model = taught(4000, random.Random(0), noise=0.1)
    predicted_s = model.predict(num_rows, num_rows * mean_pairs)
    assert predicted_s == pytest.approx(true_s(num_rows, num_rows * mean_pairs), rel=0.15)


def test_past_what_was_seen_each_row_costs_what_the_last_ones_did() -> None:
    model = StepTimeModel()
    for num_rows in (1, 64):
        model.observe(num_rows, 0, true_s(num_rows, 0))
    assert model.predict(256, 0) == pytest.approx(4 * true_s(64, 0))


def test_a_step_that_stalled_moves_the_prediction_little() -> None:
    model = StepTimeModel()
    for _ in range(100):
        model.observe(4, 400, 0.010)
    model.observe(4, 400, 60.0)
    predicted_s = model.predict(4, 400)
    assert predicted_s is not None
    assert predicted_s < 0.014


def test_one_slow_step_of_few_rows_does_not_make_more_rows_look_free() -> None:
    model = StepTimeModel()
    for _ in range(20):
        for num_rows in (8, 16, 64):
            model.observe(num_rows, 0, true_s(num_rows, 0))
    model.observe(11, 0, 4 * true_s(11, 0))
    for num_rows in (8, 16, 64):
        assert model.predict(num_rows, 0) == pytest.approx(true_s(num_rows, 0), rel=0.3)


def test_a_new_bin_averages_its_first_steps_alike() -> None:
    model = StepTimeModel()
    for step_s in (0.018, 0.006, 0.006):
        model.observe(4, 0, step_s)
    assert model.predict(4, 0) == pytest.approx(0.010)


def test_a_machine_that_became_slower_is_followed() -> None:
    model = StepTimeModel()
    for _ in range(50):
        model.observe(4, 400, 0.010)
    for _ in range(50):
        model.observe(4, 400, 0.030)
    assert model.predict(4, 400) == pytest.approx(0.030, rel=0.05)


STEPS = st.lists(
    st.tuples(st.integers(1, 600), st.integers(0, 100_000), st.floats(1e-4, 10.0)), min_size=1, max_size=40
)


@given(steps=STEPS, at=st.tuples(st.integers(1, 900), st.integers(0, 100_000)), more=st.integers(0, 300))
def test_more_rows_or_pairs_never_take_less(
    steps: list[tuple[int, int, float]], at: tuple[int, int], more: int
) -> None:
    model = StepTimeModel()
    for step in steps:
        model.observe(*step)
    num_rows, num_pairs = at
    base_s, more_rows_s = model.predict(num_rows, num_pairs), model.predict(num_rows + more, num_pairs)
    more_pairs_s = model.predict(num_rows, num_pairs + more)
    assert base_s is not None
    assert more_rows_s is not None
    assert more_pairs_s is not None
    assert 0 <= base_s <= more_rows_s
    assert base_s <= more_pairs_s
