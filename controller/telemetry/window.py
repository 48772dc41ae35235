"""What traffic looked like between two moments: the difference of two readings. Pure functions.

A counter that fell has been reset by a restart; what it counts since then is its difference. Percentiles are told as
the bucket that holds them, never interpolated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.engine.scrape import Figures, Histogram


@dataclass(frozen=True, slots=True)
class Percentile:
    """The bucket that holds a percentile, in seconds: above ``low_s`` and up to ``high_s`` (``None``: unbounded)."""

    low_s: float
    high_s: float | None


@dataclass(frozen=True, slots=True)
class TrafficWindow:
    """Traffic of all replicas over ``duration_s``. ``None``: no request in the window, or the figure is missing."""

    duration_s: float
    requests_per_s: float | None
    output_tokens_per_s: float | None
    error_ratio: float | None
    ttft_p95: Percentile | None
    tpot_p95: Percentile | None
    running: float | None
    waiting: float | None
    kv_usage_ratio: float | None
    preemptions_per_s: float | None


def traffic_window(readings: Sequence[tuple[Figures, Figures]]) -> TrafficWindow | None:
    """The window that each replica's earlier and later reading span; ``None`` without any.

    Args:
        readings: One (earlier, later) pair a replica.
    """
    spans = [
        later.at_unix_s - earlier.at_unix_s for earlier, later in readings if later.at_unix_s > earlier.at_unix_s
    ]
    if not spans:
        return None
    duration_s = max(spans)

    def grown(name: str) -> float | None:
        differences = [_grown(a.values.get(name), b.values.get(name)) for a, b in readings]
        known = [d for d in differences if d is not None]
        return sum(known) if known else None

    def rate(name: str) -> float | None:
        growth = grown(name)
        return None if growth is None else growth / duration_s

    outcomes = {key for _, b in readings for key in b.values if key.startswith("requests.")}
    ended = {key: grown(key) or 0.0 for key in outcomes if key != "requests.cancelled"}
    bad = ended.get("requests.failed", 0.0) + ended.get("requests.refused", 0.0)
    num = sum(ended.values())
    return TrafficWindow(
        duration_s=duration_s,
        requests_per_s=num / duration_s if outcomes else None,
        output_tokens_per_s=rate("output_tokens"),
        error_ratio=bad / num if num else None,
        ttft_p95=_percentile(readings, "ttft_s", 0.95),
        tpot_p95=_percentile(readings, "tpot_s", 0.95),
        running=_total(readings, "running"),
        waiting=_total(readings, "waiting"),
        kv_usage_ratio=max(
            (b.values["kv_usage_ratio"] for _, b in readings if "kv_usage_ratio" in b.values), default=None
        ),
        preemptions_per_s=rate("preemptions"),
    )


def _total(readings: Sequence[tuple[Figures, Figures]], name: str) -> float | None:
    values = [b.values[name] for _, b in readings if name in b.values]
    return sum(values) if values else None


def _grown(earlier: float | None, later: float | None) -> float | None:
    if later is None:
        return None
    if earlier is None or later < earlier:
        return later
    return later - earlier


def _percentile(readings: Sequence[tuple[Figures, Figures]], name: str, share: float) -> Percentile | None:
    counts: dict[float, float] = {}
    for earlier, later in readings:
        after = later.histograms.get(name)
        if after is None:
            continue
        before = earlier.histograms.get(name)
        for bound, count in zip(after.bounds, _counts_since(before, after), strict=True):
            counts[bound] = counts.get(bound, 0.0) + count
    total = counts.get(math.inf, 0.0)
    if total <= 0:
        return None
    low_s = 0.0
    for bound in sorted(counts):
        if counts[bound] >= share * total:
            return Percentile(low_s, bound if math.isfinite(bound) else None)
        low_s = bound
    return None


def _counts_since(before: Histogram | None, after: Histogram) -> list[float]:
    if before is None or before.bounds != after.bounds or before.counts[-1] > after.counts[-1]:
        return list(after.counts)
    return [b - a for a, b in zip(before.counts, after.counts, strict=True)]
