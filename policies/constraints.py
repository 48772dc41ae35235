"""From a trial's figures to constraint values: at or below 0 is kept, above is broken.

Each value is relative (``figure / bound − 1``), so that values of different units compare. A figure that is missing
breaks its constraint.
"""

from __future__ import annotations

from collections.abc import Mapping

from trimtab.policies.figures import LoadFigures, Percentiles, QualityFigures, TrialFigures
from trimtab.policies.manifest import SLO, LatencySLO, Quality

MISSING = 1e6  # finite, because samplers sort by it; larger than any figure that a trial can measure


def load_constraints(slo: SLO, load: LoadFigures) -> dict[str, float]:
    """One value for each bound of the SLO, and one for oversaturation."""
    values = {**_latency("ttft", slo.ttft, load.ttft_s), **_latency("tpot", slo.tpot, load.tpot_s)}
    error_ratio = load.error_ratio
    values["error_rate"] = MISSING if error_ratio is None else error_ratio - slo.errorRate
    values["oversaturation"] = 1.0 if load.oversaturated else 0.0
    return values


def quality_constraints(quality: Quality, figures: QualityFigures | None) -> dict[str, float]:
    """KL and perplexity against their floors."""
    if figures is None:
        return {"kl": MISSING, "perplexity": MISSING}
    return {
        "kl": _finite(figures.kl_nats / quality.maxKL - 1),
        "perplexity": _finite(figures.perplexity_increase_ratio - quality.maxPerplexityIncrease),
    }


def trial_constraints(slo: SLO, quality: Quality, figures: TrialFigures) -> dict[str, float]:
    """Every constraint of one trial, at the recorded rate."""
    return {**load_constraints(slo, figures.load), **quality_constraints(quality, figures.quality)}


def broken(values: Mapping[str, float]) -> tuple[str, ...]:
    """The names of the constraints that are not kept. NaN is not kept."""
    return tuple(name for name, value in values.items() if not value <= 0)


def describe(name: str, value: float) -> str:
    """One broken constraint for people: its name and by how much."""
    if value >= MISSING:
        return f"{name}: not measured"
    if name == "oversaturation":
        return "oversaturation: the queue and TTFT kept rising"
    if name in ("error_rate", "perplexity"):
        return f"{name}: {value:.2%} above its bound"
    return f"{name}: {value + 1:.2f} times its bound"


def _latency(name: str, slo: LatencySLO | None, seen: Percentiles | None) -> dict[str, float]:
    if slo is None:
        return {}
    return {
        f"{name}_p{percent}": MISSING if seen is None else _finite(seen.at(percent) / bound - 1)
        for percent, bound in slo.bounds().items()
    }


def _finite(value: float) -> float:
    return value if abs(value) < MISSING else MISSING
