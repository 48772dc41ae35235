"""An always-valid interval for the mean of few, roughly normal observations of unknown variance.

It may be looked at after every observation without inflating its error: the interval inverts the t-test Bayes factor
with a normal prior on the standardised effect, which under the right Haar prior on the scale is a test martingale for
every scale (Lai 1976; Wang and Ramdas, arXiv 2310.03722; the factor itself: Rouder et al. 2009). The judge feeds it
one paired difference a window, so correlation inside a window does not matter; correlation across windows does, and
is why windows must be several correlation times long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

PRIOR_VARIANCE = 1.0  # of the effect in standard deviations: harm of about one window's noise is expected


@dataclass(frozen=True, slots=True)
class Interval:
    """``low`` and ``high`` may be infinite while there are too few observations."""

    mean: float
    low: float
    high: float
    num_observations: int


def mean_interval(observations: Sequence[float], alpha: float) -> Interval:
    """The interval that covers the true mean at all times with probability ``1 - alpha``.

    Raises:
        ValueError: no observation, or ``alpha`` outside (0, 1).
    """
    if not observations or not 0 < alpha < 1:
        raise ValueError(f"needs observations and 0 < alpha < 1, got {len(observations)} and {alpha}")
    n = len(observations)
    mean = math.fsum(observations) / n
    if n < 2:
        return Interval(mean, -math.inf, math.inf, n)
    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in observations) / (n - 1))
    half = _critical_t(n, alpha) * deviation / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n) if math.isfinite(half) else Interval(mean, -half, half, n)


def _critical_t(n: int, alpha: float) -> float:
    """The |t| at which the Bayes factor of ``n`` observations reaches ``1/alpha``; infinite when none does."""
    growth = 1 + n * PRIOR_VARIANCE
    ratio = (math.sqrt(growth) / alpha) ** (2 / n)
    return math.sqrt((n - 1) * (ratio - 1) / (1 - ratio / growth)) if ratio < growth else math.inf
