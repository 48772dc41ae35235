"""From a trial's figures to one score. Experiments tell it to the sampler; the report ranks by it."""

from __future__ import annotations

from typing import Literal

from trimtab.policies.figures import TrialFigures
from trimtab.policies.manifest import Objective, ObjectiveMetric

TIE_TOLERANCE = 1e-9


def score(objective: Objective, figures: TrialFigures) -> float | None:
    """The objective's figure in its own unit; ``None`` when it was not measured.

    Goodput is requests per second, throughput output tokens per second, TTFT and TPOT seconds (means: percentiles
    are for SLOs, and a mean of few requests is steadier than their p95).
    """
    match objective.metric:
        case ObjectiveMetric.GOODPUT:
            return figures.goodput_per_s
        case ObjectiveMetric.THROUGHPUT:
            return figures.load.output_tokens_per_s
        case ObjectiveMetric.TTFT:
            return figures.load.ttft_s.mean if figures.load.ttft_s else None
        case ObjectiveMetric.TPOT:
            return figures.load.tpot_s.mean if figures.load.tpot_s else None


def unit(objective: Objective) -> str:
    """The unit of ``score``, for people."""
    return {
        ObjectiveMetric.GOODPUT: "requests/s",
        ObjectiveMetric.THROUGHPUT: "tokens/s",
        ObjectiveMetric.TTFT: "s",
        ObjectiveMetric.TPOT: "s",
    }[objective.metric]


def direction(objective: Objective) -> Literal["maximize", "minimize"]:
    """Which way the score is better."""
    return "maximize" if objective.larger_is_better else "minimize"


def gain(objective: Objective, candidate: float, incumbent: float) -> float:
    """How much better ``candidate`` is, in the score's unit: positive is better in either direction."""
    return candidate - incumbent if objective.larger_is_better else incumbent - candidate


def is_better(objective: Objective, candidate: float, incumbent: float) -> bool:
    """Whether ``candidate`` beats ``incumbent``. A tie does not: it keeps the incumbent."""
    return gain(objective, candidate, incumbent) > TIE_TOLERANCE * max(1.0, abs(incumbent))
