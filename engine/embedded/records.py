"""What the engine remembers of each request: its timeline while it runs, its record afterwards.

The core keeps a ``Timeline`` a request; the ring keeps the newest records for ``GET /admin/records``.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, replace

from trimtab.engine.contract import RequestOutcome, RequestRecord

RING_RECORDS = 10_000


@dataclass(slots=True, eq=False)
class Timeline:
    """When one request's steps happened. Times are seconds of the monotonic clock, except ``arrival_unix_s``."""

    arrival_s: float
    arrival_unix_s: float
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    max_itl_s: float | None = None
    num_decode_steps: int = 0
    decode_steps_s: float = 0.0
    decode_batch_sum: int = 0

    def note_decode_step(self, step_s: float, num_running: int) -> None:
        self.num_decode_steps += 1
        self.decode_steps_s += step_s
        self.decode_batch_sum += num_running

    def note_tokens(self, now_s: float) -> float | None:
        """Notes that tokens came out now. Returns the time since the last ones, ``None`` for the first."""
        gap_s = None
        if self.last_token_s is None:
            self.first_token_s = now_s
        else:
            gap_s = now_s - self.last_token_s
            self.max_itl_s = max(gap_s, self.max_itl_s or 0.0)
        self.last_token_s = now_s
        return gap_s

    def record(self, ended: Ending, now_s: float) -> RequestRecord:
        """The finished request's record; its ``sequence`` is set by the ring."""
        duration_s = now_s - self.arrival_s
        ttft_s = None if self.first_token_s is None else self.first_token_s - self.arrival_s
        several = ttft_s is not None and ended.output_tokens > 1
        steps = self.num_decode_steps
        return RequestRecord(
            sequence=0,
            request_id=ended.request_id,
            arrival_unix_s=self.arrival_unix_s,
            finished_unix_s=self.arrival_unix_s + duration_s,
            outcome=ended.outcome,
            prompt_tokens=ended.prompt_tokens,
            output_tokens=ended.output_tokens,
            queue_s=None if self.admitted_s is None else self.admitted_s - self.arrival_s,
            ttft_s=ttft_s,
            tpot_s=(duration_s - ttft_s) / (ended.output_tokens - 1) if several and ttft_s is not None else None,
            max_itl_s=self.max_itl_s,
            duration_s=duration_s,
            mean_batch_size=self.decode_batch_sum / steps if steps else None,
            mean_step_s=self.decode_steps_s / steps if steps else None,
        )


@dataclass(frozen=True, slots=True)
class Ending:
    """How one request ended, and with how many tokens."""

    request_id: str
    outcome: RequestOutcome
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class RingPage:
    """Records after a cursor. ``num_dropped`` counts those after it that the ring has already forgotten."""

    records: tuple[RequestRecord, ...]
    next_cursor: int
    num_dropped: int


class RecordRing:
    """The newest records, numbered from 1. Safe to use from several threads."""

    def __init__(self, capacity: int = RING_RECORDS) -> None:
        self._lock = threading.Lock()
        self._records: deque[RequestRecord] = deque(maxlen=capacity)
        self._last_sequence = 0

    def add(self, record: RequestRecord) -> None:
        with self._lock:
            self._last_sequence += 1
            self._records.append(replace(record, sequence=self._last_sequence))

    def since(self, cursor: int) -> RingPage:
        """Records numbered above ``cursor``. A cursor from the future belongs to an earlier process: all are new."""
        with self._lock:
            if cursor > self._last_sequence:
                cursor = 0
            num_new = self._last_sequence - cursor
            num_kept = min(num_new, len(self._records))
            newest = tuple(self._records)[len(self._records) - num_kept :]
            return RingPage(newest, self._last_sequence, num_new - num_kept)
