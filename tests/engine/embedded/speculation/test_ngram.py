"""N-gram drafts: what followed the last tokens before."""

from hypothesis import given
from hypothesis import strategies as st

from trimtab.engine.embedded.speculation.ngram import MATCH_LENGTHS, NgramIndex, num_accepted


def by_search(tokens: list[int], num_wanted: int) -> list[int]:
    for length in MATCH_LENGTHS:
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[-length:]:
                return tokens[start + length : start + length + num_wanted]
    return []


@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60), num_wanted=st.integers(1, 7))
def test_the_index_finds_what_a_plain_search_finds(tokens: list[int], num_wanted: int) -> None:
    index = NgramIndex()
    for end in range(1, len(tokens) + 1):
        assert index.propose(tokens[:end], num_wanted) == by_search(tokens[:end], num_wanted)


@given(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=40))
def test_an_index_that_skipped_steps_finds_the_same(tokens: list[int]) -> None:
    index = NgramIndex()
    for end in [*range(1, len(tokens), 3), len(tokens)]:
        found = index.propose(tokens[:end], 4)
    assert found == by_search(tokens, 4)


def test_drafts_are_accepted_up_to_the_first_that_differs() -> None:
    assert num_accepted([5, 6, 7], [5, 6, 8, 9]) == 2
    assert num_accepted([], [4]) == 0
    assert num_accepted([1, 2], [1, 2, 3]) == 2
