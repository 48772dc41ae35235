"""Scores: the right figure, the right direction, and ties keep the incumbent."""

import pytest

from trimtab.policies import objective
from trimtab.policies.figures import LoadFigures, Percentiles, TrialFigures
from trimtab.policies.manifest import Objective

LOAD = LoadFigures(
    2.0, 10, 10, 0, 0, Percentiles(0.3, 0.2, 0.9, 1.0, 10), Percentiles(0.02, 0.02, 0.03, 0.04, 10), None, None,
    123.0, 2.0, False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("goal", "expected"),
    [
        (Objective(maximize="goodput"), 4.0),
        (Objective(maximize="throughput"), 123.0),
        (Objective(minimize="ttft"), 0.3),
        (Objective(minimize="tpot"), 0.02),
    ],
)
def test_each_objective_scores_its_figure(goal: Objective, expected: float) -> None:
    assert objective.score(goal, TrialFigures(LOAD, 4.0, None)) == expected


def test_goodput_that_was_not_looked_for_has_no_score() -> None:
    assert objective.score(Objective(maximize="goodput"), TrialFigures(LOAD, None, None)) is None


def test_better_means_larger_or_smaller_as_the_objective_says() -> None:
    assert objective.is_better(Objective(maximize="goodput"), 2.0, 1.0)
    assert objective.is_better(Objective(minimize="ttft"), 1.0, 2.0)
    assert not objective.is_better(Objective(minimize="ttft"), 2.0, 1.0)


def test_a_tie_is_not_better() -> None:
    assert not objective.is_better(Objective(maximize="goodput"), 3.0, 3.0)
    assert not objective.is_better(Objective(minimize="tpot"), 0.02, 0.02)
