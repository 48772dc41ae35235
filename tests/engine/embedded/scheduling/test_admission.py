"""What is expected of outputs, and the memory that sequences will need at their worst moment."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.engine.embedded.scheduling.admission import OutputLengths, peak_tokens


def peak_by_stepping(sequences: list[tuple[int, int]]) -> int:
    """Grows every sequence a token a step until it is done; the memory is at its largest in one of the steps."""
    peak = 0
    for step in range(max((coming for _, coming in sequences), default=0) + 1):
        peak = max(peak, sum(held + step for held, coming in sequences if coming >= step))
    return peak


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 60)), max_size=12))
def test_the_peak_is_what_stepping_finds(sequences: list[tuple[int, int]]) -> None:
    assert peak_tokens(sequences) == peak_by_stepping(sequences)


def remembering(*num_tokens: int) -> OutputLengths:
    lengths = OutputLengths()
    for number in num_tokens:
        lengths.add(number)
    return lengths


def test_half_of_what_is_allowed_is_expected_while_little_is_known() -> None:
    assert remembering(1, 1, 1).expected_remaining(20, 120) == 50


def test_the_mean_of_those_that_were_longer_is_expected() -> None:
    lengths = remembering(*[10] * 8, 100, 200)
    assert lengths.expected_remaining(0, 1000) == pytest.approx((8 * 10 + 100 + 200) / 10)
    assert lengths.expected_remaining(10, 1000) == pytest.approx(150 - 10)
    assert lengths.expected_remaining(150, 1000) == pytest.approx(50)


def test_an_output_longer_than_all_before_is_expected_to_double() -> None:
    assert remembering(*[10] * 8).expected_remaining(40, 1000) == 40


def test_old_lengths_are_forgotten() -> None:
    lengths = remembering(*[1000] * 256, *[8] * 256)
    assert lengths.expected_remaining(0, 4000) == 8


@given(
    lengths=st.lists(st.integers(1, 300), max_size=300),
    num_produced=st.integers(0, 400),
    num_left=st.integers(0, 400),
)
def test_never_more_than_is_allowed_and_never_nothing(lengths: list[int], num_produced: int, num_left: int) -> None:
    expected = remembering(*lengths).expected_remaining(num_produced, num_produced + num_left)
    assert 1 <= expected <= max(1, num_left)
    longer = [n for n in lengths[-256:] if n > num_produced]
    if len(lengths) >= 8 and longer:
        mean = sum(longer) / len(longer) - num_produced
        assert expected == pytest.approx(max(1, min(num_left, mean)))
