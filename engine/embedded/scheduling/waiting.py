"""Those that wait for admission, and in which order the scheduling policy takes them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trimtab.engine.embedded.scheduling.limits import SchedulerLimits, SchedulingPolicy
from trimtab.engine.embedded.scheduling.sequence import Sequence

Rank = tuple[float, ...]


def rank(sequence: Sequence, limits: SchedulerLimits, now_s: float) -> Rank:
    """Sorts sequences by who comes first.

    Whoever has been here for ``ageing_s`` comes before all who have not, in the order of arrival: whatever arrives
    later can hold a sequence up for no longer than that.
    """
    in_order = (sequence.arrival_s, sequence.sequence_id)
    if limits.scheduling_policy is SchedulingPolicy.FCFS or now_s - sequence.arrival_s >= limits.ageing_s:
        return (0, *in_order)
    if limits.scheduling_policy is SchedulingPolicy.PRIORITY:
        deadline_s = math.inf if sequence.deadline_s is None else sequence.deadline_s
        return (1, sequence.priority, deadline_s, *in_order)
    return (1, sequence.num_pending_tokens, *in_order)


class WaitingQueue:
    """Sequences that own no blocks of the pool, those that were preempted included."""

    def __init__(self) -> None:
        self._sequences: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self._sequences

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def add(self, sequence: Sequence) -> None:
        self._sequences[sequence.sequence_id] = sequence

    def remove(self, sequence: Sequence) -> None:
        del self._sequences[sequence.sequence_id]

    def first(self, limits: SchedulerLimits, now_s: float) -> Sequence:
        """Who is admitted next. The queue must not be empty."""
        return min(self._sequences.values(), key=lambda s: rank(s, limits, now_s))

    def late(self, limits: SchedulerLimits, now_s: float) -> list[tuple[Sequence, str]]:
        """Who has waited too long, and what to tell its client. A sequence that was admitted once never is."""
        late = []
        for sequence in self._sequences.values():
            waited_s = now_s - sequence.arrival_s
            if sequence.num_cached_tokens is not None:
                continue
            if sequence.deadline_s is not None and now_s > sequence.deadline_s:
                late.append((sequence, f"its deadline passed after {1000 * waited_s:.0f} ms in the queue"))
            elif waited_s > limits.max_queue_s:
                limit_ms = 1000 * limits.max_queue_s
                late.append((sequence, f"it waited {1000 * waited_s:.0f} ms; max_queue_ms is {limit_ms:.0f}"))
        return late
