"""Whether errors fall on the canary more often than its share of requests explains.

Under the null each error falls on the canary with probability ``share``, whatever the error rate does over time, so
the test stays valid while the rate changes (Lindon and Malek, arXiv 2011.03567, for two arms and a beta prior).
"""

from __future__ import annotations

import math

from scipy.special import betaln

PRIOR_STRENGTH = 2.0  # pseudo-errors; centred on the null's share


def log_e_value(num_on_canary: int, num_on_baseline: int, share: float) -> float:
    """The natural logarithm of the e-value; reject at ``alpha`` when it reaches ``-log(alpha)``.

    Args:
        num_on_canary: Errors that fell on the canary.
        num_on_baseline: Errors that fell on the baseline.
        share: The canary's share of the requests of both arms, in (0, 1).
    """
    a, b = PRIOR_STRENGTH * share, PRIOR_STRENGTH * (1 - share)
    mixture = float(betaln(a + num_on_canary, b + num_on_baseline) - betaln(a, b))
    return mixture - num_on_canary * math.log(share) - num_on_baseline * math.log1p(-share)
