"""What the engine remembers of each request: its timeline while it runs, its record afterwards.

The core keeps a ``Timeline`` a request; the ring keeps the newest records for ``GET /admin/records``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np

from trimtab.engine.contract import RequestOutcome, RequestRecord

RING_RECORDS = 10_000

# A record as the ring stores it, in the order of ``RequestRecord``'s fields.
_ROW = np.dtype(
    [
        ("sequence", np.int64),
        ("request_id", "S144"),  # the 128 characters that the edge accepts, and the prompt's number
        ("arrival_unix_s", np.float64),
        ("finished_unix_s", np.float64),
        ("outcome", "S16"),
        ("prompt_tokens", np.int64),
        ("output_tokens", np.int64),
        ("queue_s", np.float64),
        ("ttft_s", np.float64),
        ("tpot_s", np.float64),
        ("max_itl_s", np.float64),
        ("duration_s", np.float64),
        ("mean_batch_size", np.float64),
        ("mean_step_s", np.float64),
    ]
)
_FIELDS = attrgetter(*_ROW.names or ())
_OPTIONAL = ("queue_s", "ttft_s", "tpot_s", "max_itl_s", "mean_batch_size", "mean_step_s")  # NaN stands for None


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
    """The newest records, numbered from 1. Safe to use from several threads.

    All memory it will ever need is taken at the start, so that an engine that has served a million requests is as
    large as one that has served none.
    """

    def __init__(self, capacity: int = RING_RECORDS) -> None:
        self._lock = threading.Lock()
        self._rows = np.empty(capacity, _ROW)
        self._rows.view(np.uint8).fill(0xFF)  # touches every page now, not when the ring fills
        self._last_sequence = 0

    def add(self, record: RequestRecord) -> None:
        with self._lock:
            self._last_sequence += 1
            numbered = replace(record, sequence=self._last_sequence)
            self._rows[self._last_sequence % len(self._rows)] = _FIELDS(numbered)

    def since(self, cursor: int) -> RingPage:
        """Records numbered above ``cursor``. A cursor from the future belongs to an earlier process: all are new."""
        with self._lock:
            last = self._last_sequence
            num_new = last - (cursor if cursor <= last else 0)
            num_kept = min(num_new, len(self._rows))
            rows = self._rows[np.arange(last - num_kept + 1, last + 1) % len(self._rows)]
        return RingPage(tuple(_record(row) for row in rows.tolist()), last, num_new - num_kept)


def _record(row: Sequence[Any]) -> RequestRecord:
    values = dict(zip(_ROW.names or (), row, strict=True))
    for name in _OPTIONAL:
        if math.isnan(values[name]):
            values[name] = None
    values["request_id"] = values["request_id"].decode("ascii")
    values["outcome"] = RequestOutcome(values["outcome"].decode("ascii"))
    return RequestRecord(**values)
