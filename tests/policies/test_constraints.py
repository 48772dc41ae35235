"""Constraints: kept at or below 0, and what is missing is never good."""

import math

import pytest

from trimtab.policies.constraints import broken, describe, load_constraints, quality_constraints
from trimtab.policies.figures import LoadFigures, Percentiles, QualityFigures
from trimtab.policies.manifest import SLO, Quality

POLICY = SLO.model_validate({"ttft": {"p50": "200ms", "p95": "1s"}, "tpot": {"p95": "50ms"}, "errorRate": "1%"})


def load(**changes: object) -> LoadFigures:
    ttft, tpot = Percentiles(0.2, 0.1, 0.5, 0.9, 100), Percentiles(0.02, 0.02, 0.04, 0.05, 100)
    values = {
        "rate_per_s": 1.0, "num_sent": 100, "num_succeeded": 100, "num_refused": 0, "num_failed": 0, "ttft_s": ttft,
        "tpot_s": tpot, "itl_s": tpot, "e2e_s": ttft, "output_tokens_per_s": 10.0, "requests_per_s": 1.0,
        "oversaturated": False,
    }  # fmt: skip
    return LoadFigures(**{**values, **changes})  # type: ignore[arg-type]


def test_every_bound_has_its_value_relative_to_the_bound() -> None:
    values = load_constraints(POLICY, load())
    assert values["ttft_p50"] == pytest.approx(-0.5)
    assert values["ttft_p95"] == pytest.approx(-0.5)
    assert values["tpot_p95"] == pytest.approx(-0.2)
    assert not broken(values)


def test_a_figure_beyond_its_bound_is_broken() -> None:
    assert broken(load_constraints(POLICY, load(tpot_s=Percentiles(0.1, 0.1, 0.06, 0.1, 9)))) == ("tpot_p95",)


def test_refused_and_failed_requests_both_count_as_errors() -> None:
    assert broken(load_constraints(POLICY, load(num_refused=1))) == ()
    assert broken(load_constraints(POLICY, load(num_refused=1, num_failed=1))) == ("error_rate",)


def test_oversaturation_is_broken() -> None:
    assert broken(load_constraints(POLICY, load(oversaturated=True))) == ("oversaturation",)


def test_missing_figures_are_broken_and_said() -> None:
    values = load_constraints(POLICY, load(ttft_s=None, num_sent=0))
    assert {"ttft_p50", "ttft_p95", "error_rate"} <= set(broken(values))
    assert describe("ttft_p95", values["ttft_p95"]) == "ttft_p95: not measured"


def test_nan_is_broken() -> None:
    assert broken({"kl": math.nan}) == ("kl",)


def test_quality_without_a_measurement_never_passes() -> None:
    assert broken(quality_constraints(Quality(), None)) == ("kl", "perplexity")


def test_quality_is_held_against_both_floors() -> None:
    floors = Quality.model_validate({"maxKL": 0.02, "maxPerplexityIncrease": "1%"})
    assert broken(quality_constraints(floors, QualityFigures(0.01, 20.1, 20.0, 500))) == ()
    assert broken(quality_constraints(floors, QualityFigures(0.03, 20.1, 20.0, 500))) == ("kl",)
    assert broken(quality_constraints(floors, QualityFigures(0.01, 20.4, 20.0, 500))) == ("perplexity",)
