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
_WEIGHT = 0.1  # of a new observation
_PAIRS_WEIGHT = 0.02
_OUTLIER = 4.0  # an observation counts for at most this many times what is expected: a busy machine is no news


@dataclass(slots=True)
class _Bin:
    """Averages over steps of about the same number of rows."""

    num_rows: float
    num_pairs: float
    step_s: float


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
        known.num_rows += _WEIGHT * (num_rows - known.num_rows)
        known.num_pairs += _WEIGHT * (num_pairs - known.num_pairs)
        known.step_s += _WEIGHT * (min(step_s, _OUTLIER * known.step_s) - known.step_s)

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
        """(rows, seconds without attention), rising."""
        if self._points is None:
            points: list[tuple[float, float]] = []
            floor_s = 0.0
            for _, known in sorted(self._bins.items()):
                floor_s = max(floor_s, known.step_s - self._pair_s * known.num_pairs)
                points.append((known.num_rows, floor_s))
            self._points = points
        return self._points


def _bin_number(num_rows: int) -> int:
    return round(_BINS_PER_OCTAVE * math.log2(num_rows))
