"""How much KV memory the running sequences will come to need, from the lengths of recent outputs.

Past-future scheduling (Gong et al., ASPLOS 2025, arXiv:2507.10150): usage peaks at one of the moments when a sequence
finishes, so the peak is the largest over those moments, with each sequence's remaining length expected from the
outputs that finished lately.
"""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Iterable

_REMEMBERED = 256
_MIN_OUTPUTS = 8  # with fewer, half of what a request allows is expected


class OutputLengths:
    """The lengths of the outputs that finished last."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=_REMEMBERED)
        self._sorted: list[int] = []
        self._sums_from: list[int] = []  # the sum of the sorted lengths from each index on

    def add(self, num_tokens: int) -> None:
        self._recent.append(num_tokens)
        self._sorted = sorted(self._recent)
        self._sums_from = list(itertools.accumulate(reversed(self._sorted)))[::-1]

    def expected_remaining(self, num_produced: int, max_tokens: int) -> float:
        """Tokens that an output of ``num_produced`` tokens so far is expected to grow by, at least 1.

        The mean of the remembered outputs that were longer; where none was, the whole length again.
        """
        allowed = max_tokens - num_produced
        start = bisect.bisect_right(self._sorted, num_produced)
        if len(self._sorted) < _MIN_OUTPUTS:
            expected = allowed / 2
        elif start == len(self._sorted):
            expected = float(num_produced)
        else:
            expected = self._sums_from[start] / (len(self._sorted) - start) - num_produced
        return max(1.0, min(float(allowed), expected))


def peak_tokens(sequences: Iterable[tuple[float, float]]) -> float:
    """The most tokens that will be held at once, from each sequence's (tokens held, tokens still to come)."""
    peak = held = 0.0
    for num_longer, (num_held, num_coming) in enumerate(sorted(sequences, key=lambda s: -s[1]), start=1):
        # When this one finishes, exactly those with at least as much to come are still here, all grown as much.
        held += num_held
        peak = max(peak, held + num_longer * num_coming)
    return peak
