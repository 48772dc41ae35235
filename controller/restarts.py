"""How soon what keeps ending is started again: at once the first time, then later and later.

Without this a configuration that cannot start, or a port that is taken, would be tried twice a second for ever, each
time with a process and a row in the store. What is remembered dies with the controller, so a restart tries at once.
"""

from __future__ import annotations

from collections.abc import Callable

MAX_DELAY_S = 60.0


class Restarts:
    """The losses of each arm, or of the proxy, since it was last ready. ``clock`` is in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_losses: dict[str, int] = {}
        self._newest: dict[str, int] = {}
        self._not_before_s: dict[str, float] = {}

    def lost(self, name: str, process_id: int) -> bool:
        """Books that its process ended; returns whether that is news."""
        if self._newest.get(name) == process_id:
            return False
        num_before = self._num_losses.get(name, 0)
        self._newest[name], self._num_losses[name] = process_id, num_before + 1
        delay_s = 0.0 if num_before == 0 else min(MAX_DELAY_S, 2.0 ** min(num_before - 1, 10))
        self._not_before_s[name] = self._clock() + delay_s
        return True

    def ready(self, name: str) -> None:
        """Books that it serves: its next loss is its first."""
        self._num_losses.pop(name, None)

    def may_start(self, name: str) -> bool:
        return self._clock() >= self._not_before_s.get(name, 0.0)
