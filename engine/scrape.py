"""Reads an engine's Prometheus text into the canonical figures that the rest of Trimtab speaks of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from trimtab.engine.contract import MetricNames
from trimtab.errors import MetricsError

TIMEOUT_S = 2.0  # of one scrape, which an engine answers from its event loop


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cumulative counts by upper bound, ascending; the last bound is infinite. ``total`` is the sum of values."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    total: float


@dataclass(frozen=True, slots=True)
class Figures:
    """One engine's figures at one time, by canonical name (the fields of ``MetricNames``).

    ``values`` has counters and gauges; one with an ``outcome`` label appears as ``requests.succeeded`` etc.
    """

    at_unix_s: float
    values: Mapping[str, float]
    histograms: Mapping[str, Histogram]


async def scrape(http: aiohttp.ClientSession, base_url: str, names: MetricNames, at_unix_s: float) -> Figures:
    """One scrape of ``base_url``/metrics. Raises ``MetricsError`` when it does not answer as it should."""
    try:
        async with http.get(f"{base_url}/metrics", timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as response:
            text = await response.text()
            if response.status != 200:
                raise MetricsError(f"{base_url}/metrics answered {response.status}")
    except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError) as error:
        raise MetricsError(f"{base_url}/metrics: {type(error).__name__}: {error}") from error
    return parse_metrics(text, names, at_unix_s)


def parse_metrics(text: str, names: MetricNames, at_unix_s: float) -> Figures:
    """The canonical figures in a Prometheus text. Raises ``MetricsError`` when it is not one; NaN is left out."""
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, float(sample.value)))
    except ValueError as error:
        raise MetricsError(f"not a Prometheus text: {error}") from error
    return assemble(samples, names, at_unix_s)


def assemble(
    samples: Mapping[str, list[tuple[Mapping[str, str], float]]], names: MetricNames, at_unix_s: float
) -> Figures:
    """Sorts samples (by exported name, as label sets with values) into canonical figures. Raises ``MetricsError``."""
    values: dict[str, float] = {}
    histograms: dict[str, Histogram] = {}
    for name in fields(names):
        exported = getattr(names, name.name)
        if exported is None:
            continue
        if f"{exported}_bucket" in samples:
            histograms[name.name] = _histogram(samples, exported)
        for labels, value in samples.get(exported, []):
            key = f"{name.name}.{labels['outcome']}" if "outcome" in labels else name.name
            if not math.isnan(value):
                values[key] = values.get(key, 0.0) + value
    return Figures(at_unix_s, values, histograms)


def _histogram(samples: Mapping[str, list[tuple[Mapping[str, str], float]]], exported: str) -> Histogram:
    by_bound: dict[float, float] = {}
    for labels, value in samples[f"{exported}_bucket"]:
        try:
            bound = float(labels["le"])
        except (KeyError, ValueError) as error:
            raise MetricsError(f"{exported}_bucket has the bound {labels.get('le')!r}; expected a number") from error
        by_bound[bound] = by_bound.get(bound, 0.0) + value
    total = sum(value for _, value in samples.get(f"{exported}_sum", []))
    bounds = tuple(sorted(by_bound))
    return Histogram(bounds, tuple(by_bound[b] for b in bounds), total)
