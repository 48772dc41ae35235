"""Prometheus text to canonical figures."""

import math

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from trimtab.engine.adapters.embedded import METRIC_NAMES
from trimtab.engine.scrape import parse_metrics
from trimtab.errors import MetricsError


def test_a_real_exposition_is_read_by_canonical_name() -> None:
    registry = CollectorRegistry()
    requests = Counter("trimtab_engine_requests", "", ["outcome"], registry=registry)
    requests.labels("succeeded").inc(3)
    requests.labels("failed").inc()
    Gauge("trimtab_engine_running_requests", "", registry=registry).set(2)
    ttft = Histogram("gen_ai_server_time_to_first_token_seconds", "", buckets=[0.1, 0.2], registry=registry)
    for value in (0.05, 0.15, 5.0):
        ttft.observe(value)
    figures = parse_metrics(generate_latest(registry).decode(), METRIC_NAMES, 7.0)
    assert figures.values == {"requests.succeeded": 3, "requests.failed": 1, "running": 2}
    assert figures.histograms["ttft_s"].bounds == (0.1, 0.2, math.inf)
    assert figures.histograms["ttft_s"].counts == (1, 2, 3)
    assert figures.histograms["ttft_s"].total == pytest.approx(5.2)


def test_nan_is_left_out_and_garbage_is_one_error() -> None:
    assert parse_metrics("trimtab_engine_running_requests NaN\n", METRIC_NAMES, 0.0).values == {}
    with pytest.raises(MetricsError):
        parse_metrics("<html>{{{", METRIC_NAMES, 0.0)


@pytest.mark.parametrize("labels", ["", '{le="small"}'])
def test_a_bucket_without_a_bound_is_one_error(labels: str) -> None:
    with pytest.raises(MetricsError, match="gen_ai_server_request_duration_seconds_bucket"):
        parse_metrics(f"gen_ai_server_request_duration_seconds_bucket{labels} 3\n", METRIC_NAMES, 0.0)
