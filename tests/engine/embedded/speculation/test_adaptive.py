"""How many drafts are chosen, on machines whose step times are known."""

import itertools
import random
from collections.abc import Callable

import pytest

from trimtab.engine.embedded.scheduling.step_time import StepTimeModel
from trimtab.engine.embedded.speculation.adaptive import Acceptance, AdaptiveDrafting, Candidate

K = 7


def drafting_on(step_s: Callable[[int], float]) -> AdaptiveDrafting:
    model = StepTimeModel()
    for num_rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        model.observe(num_rows, 0, step_s(num_rows))
    return AdaptiveDrafting(model)


def free(_num_rows: int) -> float:
    """Reading the weights is all there is."""
    return 0.010


def arithmetic(num_rows: int) -> float:
    """Every row takes the same."""
    return 0.001 * num_rows


def roofline(num_rows: int) -> float:
    return max(0.010, 0.000_6 * num_rows)


def candidates(*ratios: float) -> list[Candidate]:
    return [Candidate(Acceptance(ratio), K) for ratio in ratios]


def run(drafting: AdaptiveDrafting, num_steps: int, accepted: float, rng: random.Random) -> list[int]:
    """One stream for so many steps, each draft accepted with this probability; returns the drafts of each step."""
    acceptance = drafting.new_sequence()
    chosen = []
    for _ in range(num_steps):
        (number,) = drafting.choose([Candidate(acceptance, K)], 1, 0)
        if number:
            num_accepted = next((i for i in range(number) if rng.random() >= accepted), number)
            drafting.observe(acceptance, number, num_accepted)
        chosen.append(number)
    return chosen


def test_all_drafts_that_may_be_accepted_are_taken_where_rows_are_free() -> None:
    assert drafting_on(free).choose(candidates(0.9), 1, 0) == [K]


def test_no_draft_is_taken_where_a_row_costs_more_than_it_brings() -> None:
    assert drafting_on(arithmetic).choose(candidates(0.9, 0.9), 2, 0) == [0, 0]


def test_those_whose_drafts_are_accepted_get_them() -> None:
    few, many = drafting_on(lambda num_rows: 0.010 * max(1, num_rows / 4)).choose(candidates(0.1, 0.95), 2, 0)
    assert few < many


def test_drafts_get_fewer_with_the_batch() -> None:
    numbers = [max(drafting_on(roofline).choose(candidates(*[0.8] * n), n, 0)) for n in (1, 4, 8, 64)]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[0] > 1
    assert numbers[-1] == 0


def test_the_number_is_the_one_that_brings_most_tokens_a_second() -> None:
    """One stream, two rows for the price of one, then each as dear as all before: by hand, k is 1."""
    drafting = drafting_on(lambda num_rows: 0.010 if num_rows <= 2 else 0.010 * (num_rows - 1))
    assert drafting.choose(candidates(0.7), 1, 0) == [1]


def test_useless_drafts_are_turned_off_and_probed_ever_less_often() -> None:
    chosen = run(drafting_on(roofline), 4000, accepted=0.0, rng=random.Random(0))
    probes = [step for step, number in enumerate(chosen) if number]
    assert sum(chosen[50:]) < 30
    gaps = [b - a for a, b in itertools.pairwise(probes)][-4:]
    assert gaps == sorted(gaps)
    assert gaps[-1] == 512


def test_drafts_are_taken_up_again_when_they_are_accepted() -> None:
    drafting, rng = drafting_on(roofline), random.Random(0)
    assert run(drafting, 500, accepted=0.0, rng=rng)[-1] == 0
    again = run(drafting, 4000, accepted=1.0, rng=rng)
    assert again[-96:].count(K) == 93
    assert again[-96:].count(0) == 3  # now and then a step goes without, to know what that takes


def test_the_first_step_of_a_new_size_goes_without_drafts() -> None:
    """Between 1 row and 64 it would be guessed on a line, and drafts would look better than they are."""
    model = StepTimeModel()
    for num_rows in (1, 64):
        model.observe(num_rows, 0, roofline(num_rows))
    drafting = AdaptiveDrafting(model)
    assert drafting.choose(candidates(*[0.9] * 12), 12, 0) == [0] * 12
    model.observe(12, 0, roofline(12))
    assert any(drafting.choose(candidates(*[0.9] * 12), 12, 0))


@pytest.mark.parametrize("accepted", [0.0, 0.3, 0.6, 0.9])
def test_no_acceptance_makes_it_slower_than_without_by_three_percent(accepted: float) -> None:
    drafting, rng = drafting_on(roofline), random.Random(1)
    acceptance = drafting.new_sequence()
    num_tokens, spent_s, num_steps = 0, 0.0, 3000
    for _ in range(num_steps):
        (number,) = drafting.choose([Candidate(acceptance, K)], 12, 0)
        num_accepted = next((i for i in range(number) if rng.random() >= accepted), number)
        if number:
            drafting.observe(acceptance, number, num_accepted)
        num_tokens += 12 + num_accepted
        spent_s += roofline(12 + number)
    assert num_tokens / spent_s >= 0.97 * 12 / roofline(12)


def test_it_does_not_start_for_a_gain_that_it_would_keep() -> None:
    """Between the two bounds the state before decides: started stays started, stopped stays stopped."""
    drafting = drafting_on(lambda num_rows: 0.010 if num_rows == 1 else 0.010 * 1.42)
    at_bound = Candidate(Acceptance(0.5), 1)  # 1.5 tokens for 1.42 times the time: a gain of 1.056
    assert drafting.choose([at_bound], 1, 0) == [0]
    assert drafting.choose([Candidate(Acceptance(0.9), 1)], 1, 0) == [1]
    assert drafting.choose([at_bound], 1, 0) == [1]
    assert drafting.choose([Candidate(Acceptance(0.3), 1)], 1, 0) == [0]
    assert drafting.choose([at_bound], 1, 0) == [0]
