"""From the results of one load to its figures. Pure functions; trials and the command-line client call them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from scipy import stats

from trimtab.experiments.load.result import LoadResult, Outcome, RequestResult
from trimtab.policies.figures import LoadFigures, Percentiles

MIN_REQUESTS_FOR_SLOPE = 10
_SLOPE_P_VALUE = 0.01


def load_figures(load: LoadResult) -> LoadFigures:
    """Sums a load up. Latencies are those of the requests that succeeded; the others count as errors."""
    succeeded = [r for r in load.results if r.outcome is Outcome.SUCCEEDED]
    span_s = max([load.duration_s, *(r.last_token_s or 0.0 for r in succeeded)])
    return LoadFigures(
        rate_per_s=load.rate_per_s,
        num_sent=len(load.results),
        num_succeeded=len(succeeded),
        num_refused=sum(r.outcome is Outcome.REFUSED for r in load.results),
        num_failed=sum(r.outcome is Outcome.FAILED for r in load.results),
        ttft_s=percentiles(r.ttft_s for r in succeeded),
        tpot_s=percentiles(r.tpot_s for r in succeeded),
        itl_s=percentiles(itl for r in succeeded for itl in r.itls_s),
        e2e_s=percentiles(r.e2e_s for r in succeeded),
        output_tokens_per_s=sum(r.output_tokens for r in succeeded) / span_s,
        requests_per_s=len(succeeded) / span_s,
        oversaturated=is_oversaturated(load),
    )


def percentiles(values: Iterable[float | None]) -> Percentiles | None:
    """Linear interpolation between order statistics; ``None`` when there is no value."""
    seen = [value for value in values if value is not None]
    if not seen:
        return None
    p50, p95, p99 = (float(x) for x in np.percentile(seen, (50, 95, 99)))
    return Percentiles(math.fsum(seen) / len(seen), p50, p95, p99, len(seen))


def is_oversaturated(load: LoadResult) -> bool:
    """Whether concurrency and TTFT both kept rising while requests arrived, as an overloaded queue makes them.

    Both slopes over the intended arrivals must be positive beyond chance, and the fitted rise of TTFT over the load
    larger than its median: a slope that is real and does not matter is no overload.
    """
    seen = [r for r in load.results if r.ttft_s is not None]
    if len(seen) < MIN_REQUESTS_FOR_SLOPE:
        return False
    arrivals_s = [r.intended_s for r in seen]
    ttfts_s = [r.ttft_s or 0.0 for r in seen]
    concurrency = _concurrency(load.results, arrivals_s)
    ttft_slope = _rising_slope(arrivals_s, ttfts_s)
    rise_s = ttft_slope * (arrivals_s[-1] - arrivals_s[0])
    return rise_s > float(np.median(ttfts_s)) and _rising_slope(arrivals_s, concurrency) > 0


def _concurrency(results: Sequence[RequestResult], at_s: Sequence[float]) -> list[float]:
    """Requests in flight at each of ``at_s``, without those that were refused or broke off.

    One that had not ended when the load did stays in flight.
    """
    starts = np.sort([r.intended_s for r in results if r.outcome is Outcome.SUCCEEDED or r.kind == "deadline"])
    ends = np.sort([r.last_token_s for r in results if r.outcome is Outcome.SUCCEEDED and r.last_token_s])
    begun = np.searchsorted(starts, at_s, side="right")
    gone = np.searchsorted(ends, at_s, side="right")
    return [float(x) for x in begun - gone]


def _rising_slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The least-squares slope when it is positive at the 1 % level, else 0."""
    if min(x) == max(x) or min(y) == max(y):
        return 0.0
    fit = stats.linregress(x, y, alternative="greater")
    return float(fit.slope) if fit.pvalue < _SLOPE_P_VALUE else 0.0
