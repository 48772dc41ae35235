"""How long a step takes, learnt from the steps that were: by its rows, and by what they attend to.

The scheduler sizes prefill chunks by it, speculation its drafts. A step of few rows is bound by reading the weights
and one of many by arithmetic, so the time is not linear in the rows: it is averaged near each number of rows and
interpolated between. What attention adds is taken as linear in the attended pairs.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

_BINS_PER_OCTAVE = 4
_MAX_STEPS = 10  # that an average remembers
_PAIRS_WEIGHT = 0.02
_OUTLIER = 4.0  # an observation counts for at most this many times what is expected: a busy machine is no news


@dataclass(slots=True)
class _Bin:
    """Averages over the newest steps of about the same number of rows."""

    num_rows: float
    num_pairs: float
    step_s: float
    num_steps: int = 1  # averaged so far, at most as many as the average remembers


class StepTimeModel:
    """Knows nothing until the first observation."""

    def __init__(self) -> None:
        self._bins: dict[int, _Bin] = {}
        self._pair_s = 0.0
        self._points: list[tuple[float, float]] | None = None

    def observe(self, num_rows: int, num_pairs: int, step_s: float) -> None:
        """Takes one step of ``num_rows`` rows attending to ``num_pairs`` pairs of row and token."""
        number = _bin_number(num_rows)
        known = self._bins.get(number)
        self._points = None
        if known is None:
            self._bins[number] = _Bin(num_rows, num_pairs, step_s)
            return
        expected_s = known.step_s + self._pair_s * (num_pairs - known.num_pairs)
        error_s = min(step_s, _OUTLIER * max(expected_s, known.step_s)) - expected_s
        distance = num_pairs - known.num_pairs
        if distance:
            # Normalized least mean squares, damped where the distance is small beside what is usual.
            self._pair_s += _PAIRS_WEIGHT * error_s * distance / (distance**2 + known.num_pairs**2)
            self._pair_s = max(0.0, self._pair_s)
        known.num_steps = min(known.num_steps + 1, _MAX_STEPS)
        known.num_rows += (num_rows - known.num_rows) / known.num_steps
        known.num_pairs += (num_pairs - known.num_pairs) / known.num_steps
        known.step_s += (min(step_s, _OUTLIER * known.step_s) - known.step_s) / known.num_steps

    def has_seen(self, num_rows: int) -> bool:
        """Whether a step of about so many rows was observed."""
        return _bin_number(num_rows) in self._bins

    def predict(self, num_rows: int, num_pairs: int) -> float | None:
        """Seconds; ``None`` before anything was observed. Never falls when rows or pairs grow."""
        if not self._bins:
            return None
        points = self._curve()
        at = bisect.bisect_right(points, (num_rows, math.inf))
        if at == 0:
            base_s = points[0][1]
        elif at == len(points):
            last, last_s = points[-1]
            base_s = last_s * max(1.0, num_rows / last)  # past what is known: its time a row
        else:
            (low, low_s), (high, high_s) = points[at - 1], points[at]
            base_s = low_s + (high_s - low_s) * (num_rows - low) / (high - low)
        return base_s + self._pair_s * num_pairs

    def _curve(self) -> list[tuple[float, float]]:
        """(rows, seconds without attention), never falling: the isotonic fit to the bins.

        By pooling adjacent violators (Ayer et al., 1955): neighbours that fall are replaced by their average,
        weighted by their steps, so that a bin of one slow step moves little where its neighbours know better.
        """
        if self._points is None:
            bins = [known for _, known in sorted(self._bins.items())]
            pools: list[_Pool] = []
            for known in bins:
                pool = _Pool(max(0.0, known.step_s - self._pair_s * known.num_pairs), known.num_steps, 1)
                while pools and pools[-1].step_s >= pool.step_s:
                    pool = pools.pop().merged(pool)
                pools.append(pool)
            fitted = [pool.step_s for pool in pools for _ in range(pool.num_bins)]
            self._points = [(known.num_rows, step_s) for known, step_s in zip(bins, fitted, strict=True)]
        return self._points


@dataclass(frozen=True, slots=True)
class _Pool:
    """Adjacent bins that share one fitted time."""

    step_s: float
    num_steps: int
    num_bins: int

    def merged(self, other: _Pool) -> _Pool:
        num_steps = self.num_steps + other.num_steps
        step_s = (self.step_s * self.num_steps + other.step_s * other.num_steps) / num_steps
        return _Pool(step_s, num_steps, self.num_bins + other.num_bins)


def _bin_number(num_rows: int) -> int:
    return round(_BINS_PER_OCTAVE * math.log2(num_rows))
