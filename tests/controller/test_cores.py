"""Core sets are disjoint, or sharing is said."""

import pytest

from trimtab.controller.cores import core_sets
from trimtab.errors import ExperimentError


def test_enough_cores_are_divided() -> None:
    sets = core_sets(range(8), 2, share=False)
    assert sets.shared is None
    assert sets.slots == ((0, 1), (2, 3), (4, 5))
    assert sets.trial is None
    assert sets.client == (6, 7)


def test_too_few_cores_are_shared_only_when_the_policy_says_so() -> None:
    with pytest.raises(ExperimentError, match="share: true"):
        core_sets([0, 1], 1, share=False)
    sets = core_sets([0, 1], 1, share=True)
    assert (set(sets.slots), sets.trial, sets.client) == ({(0, 1)}, (0,), (1,))
    assert sets.shared is not None
    assert "share" in sets.shared


def test_one_core_is_shared_by_all_and_said() -> None:
    sets = core_sets([3], 1, share=True)
    assert sets.trial == sets.client == (3,)
    assert "load client shares" in (sets.shared or "")
