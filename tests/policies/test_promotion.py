"""The promotion rule: an interval above zero with every constraint kept, or the incumbent stays."""

import math

import numpy as np
import pytest

from trimtab.policies.promotion import RoundResult, decide, paired_gain

KEPT = {"ttft_p95": -0.2, "kl": -0.5}


def rounds(pairs: list[tuple[float | None, float | None]], **constraints: float) -> list[RoundResult]:
    return [RoundResult(c, i, KEPT | constraints) for c, i in pairs]


def test_the_interval_is_students_t_on_the_paired_differences() -> None:
    gain = paired_gain(rounds([(12.0, 10.0), (13.0, 10.0), (14.0, 10.0)]), 0.05)
    assert gain is not None
    # differences 2, 3, 4: mean 3, deviation 1, t(0.975, 2) = 4.3027
    assert gain.mean == pytest.approx(3.0)
    assert gain.low == pytest.approx(3.0 - 4.302653 / math.sqrt(3), rel=1e-6)
    assert gain.ratio == pytest.approx(0.3)


def test_a_clear_gain_with_everything_kept_wins() -> None:
    decided = decide({"a": rounds([(12.0, 10.0), (12.1, 10.0), (11.9, 10.0)])})
    assert decided.winner_id == "a"
    assert "gain 2" in decided.sentence


def test_an_interval_that_touches_zero_keeps_the_incumbent() -> None:
    decided = decide({"a": rounds([(12.0, 10.0), (9.0, 10.0), (13.0, 10.0)])})
    assert decided.winner_id is None
    assert "not above zero" in decided.sentence


def test_equal_scores_keep_the_incumbent() -> None:
    assert decide({"a": rounds([(10.0, 10.0)] * 3)}).winner_id is None


def test_a_broken_constraint_loses_whatever_the_gain() -> None:
    decided = decide({"a": rounds([(20.0, 10.0)] * 3, kl=0.5)})
    assert decided.winner_id is None
    assert "kl: 1.50 times its bound" in decided.sentence


def test_a_constraint_that_a_round_lacks_is_not_kept() -> None:
    results = rounds([(20.0, 10.0)] * 2)
    results[1] = RoundResult(20.0, 10.0, {"ttft_p95": -0.2})
    assert decide({"a": results}).winner_id is None


def test_no_constraints_at_all_is_not_kept() -> None:
    assert decide({"a": [RoundResult(20.0, 10.0, {})] * 3}).winner_id is None


@pytest.mark.parametrize("lost", [(None, 10.0), (20.0, None)])
def test_a_round_that_could_not_be_measured_keeps_the_incumbent(lost: tuple[float | None, float | None]) -> None:
    decided = decide({"a": rounds([(20.0, 10.0), (20.0, 10.0), lost])})
    assert decided.winner_id is None
    assert "1 of 3 rounds could not be measured" in decided.sentence


def test_a_single_round_proves_nothing() -> None:
    assert decide({"a": rounds([(20.0, 10.0)])}).winner_id is None


def test_the_largest_proved_gain_wins() -> None:
    some, more = rounds([(12.0, 10.0)] * 3), rounds([(15.0, 10.0)] * 3)
    assert decide({"some": some, "more": more}).winner_id == "more"


def test_without_finalists_the_incumbent_stays() -> None:
    assert decide({}).winner_id is None


def test_equal_configurations_seldom_win() -> None:
    """Two finalists no better than the incumbent: one wins in at most half of the 5 % that two sides share."""
    generator = np.random.default_rng(7)
    wins = 0
    for _ in range(2000):
        noise = generator.normal(10.0, 1.0, (3, 3))
        finalists = {str(k): rounds([(row[k], row[2]) for row in noise]) for k in (0, 1)}
        wins += decide(finalists).winner_id is not None
    assert wins / 2000 < 0.035
