"""Traffic from a JSONL trace with prompts.

One request a line::

    {"at_s": 0.35, "prompt": "Tell me ...", "output_tokens": 64}

``at_s`` is the arrival in seconds from any origin, not falling from line to line; ``prompt`` is the text that is
sent; ``output_tokens`` is the length that the answer is pinned to. Other keys are errors. A trace that is shorter
than the load goes round. Half of its requests, chosen by a seed, are held out for confirmation.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.errors import WorkloadError
from trimtab.experiments.workload.interface import PlannedRequest

MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_AT_S = 1e13  # a Unix time in milliseconds still passes
MAX_RATE_PER_S = 1e5  # beyond any load client; a clock in other units than seconds shows as more
FIELDS = ("at_s", "prompt", "output_tokens")


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded request."""

    at_s: float
    prompt: str
    output_tokens: int


@dataclass(frozen=True, slots=True)
class TraceWorkload:
    """Rows with the clock that they are replayed on. Held-out splits draw a sub-sample of the held-out half."""

    name: str
    rows: tuple[TraceRow, ...]  # this half's, from 0 s
    other_rows: tuple[TraceRow, ...]  # the held-out half
    rate_per_s: float
    offset: int = 0  # row to begin with; held-out rounds begin at different ones

    @property
    def content_known(self) -> bool:
        return True

    def requests(self, duration_s: float) -> tuple[PlannedRequest, ...]:
        gaps = _gaps(self.rows)
        planned: list[PlannedRequest] = []
        at_s = 0.0
        while True:
            place = (self.offset + len(planned)) % len(self.rows)
            at_s += gaps[place] / self.rate_per_s
            if at_s >= duration_s:
                return tuple(planned)
            row = self.rows[place]
            planned.append(PlannedRequest(len(planned), at_s, row.prompt, row.output_tokens))

    def at_rate(self, rate_per_s: float) -> TraceWorkload:
        return dataclasses.replace(self, rate_per_s=rate_per_s)

    def held_out(self, seed: int) -> TraceWorkload:
        rows = self.other_rows
        offset = int(np.random.default_rng(seed).integers(len(rows)))
        return dataclasses.replace(self, rows=rows, offset=offset)

    def describe(self) -> str:
        return f"trace {self.name}, {len(self.rows)} requests, replayed at {self.rate_per_s:g}/s"


def read_trace(path: Path, *, rate_per_s: float | None, seed: int) -> TraceWorkload:
    """Reads and splits a trace.

    Args:
        rate_per_s: the mean rate to scale its clock to; ``None`` keeps the recorded one.
        seed: decides which half is held out.

    Raises:
        WorkloadError: the file cannot be read, a line is malformed (the message has its number), or there are
            fewer than 4 requests.
    """
    rows: list[TraceRow] = []
    try:
        with path.open("rb") as lines:
            number = 0
            while line := lines.readline(MAX_LINE_BYTES + 1):
                number += 1
                if line.strip():
                    rows.append(_row(path, number, line, rows[-1].at_s if rows else -math.inf))
    except OSError as error:
        raise WorkloadError(f"{path}: cannot be read: {error.strerror}") from error
    if len(rows) < 4:
        raise WorkloadError(f"{path}: {len(rows)} requests; a search and a held-out half need at least 4")
    span_s = rows[-1].at_s - rows[0].at_s
    if rate_per_s is None and span_s <= 0:
        raise WorkloadError(f"{path}: all requests arrive at once; give the workload a rate")
    recorded_per_s = (len(rows) - 1) / span_s if span_s > 0 else 1.0
    if rate_per_s is None and recorded_per_s > MAX_RATE_PER_S:
        raise WorkloadError(
            f"{path}: {recorded_per_s:g} requests a second; accepted: up to {MAX_RATE_PER_S:g}, or give it a rate"
        )
    held_out = set(np.random.default_rng(seed).permutation(len(rows))[: len(rows) // 2].tolist())
    kept = tuple(row for i, row in enumerate(rows) if i not in held_out)
    other = tuple(row for i, row in enumerate(rows) if i in held_out)
    return TraceWorkload(path.name, kept, other, rate_per_s or recorded_per_s)


def _row(path: Path, number: int, line: bytes, previous_s: float) -> TraceRow:
    where = f"{path}:{number}"
    if len(line) > MAX_LINE_BYTES:
        raise WorkloadError(f"{where}: a line is longer than {MAX_LINE_BYTES} bytes")
    try:
        body = json.loads(line)
        json.dumps(body, ensure_ascii=False).encode()  # half a surrogate pair cannot be sent
    except (ValueError, RecursionError) as error:
        raise WorkloadError(f"{where}: not JSON: {error}") from error
    if not isinstance(body, Mapping) or set(body) != set(FIELDS):
        found = ", ".join(map(str, body)) if isinstance(body, Mapping) else type(body).__name__
        raise WorkloadError(f"{where}: found {found or 'nothing'}; accepted: an object with {', '.join(FIELDS)}")
    at_s = _number(where, "at_s", body["at_s"])
    if at_s < previous_s:
        raise WorkloadError(f"{where}: at_s {at_s:g} is before the line above ({previous_s:g})")
    prompt, output_tokens = body["prompt"], body["output_tokens"]
    if not isinstance(prompt, str) or not prompt:
        raise WorkloadError(f"{where}: prompt must be text that is not empty")
    if isinstance(output_tokens, bool) or not isinstance(output_tokens, int) or output_tokens < 1:
        raise WorkloadError(f"{where}: output_tokens {output_tokens!r} must be a whole number of at least 1")
    return TraceRow(at_s, prompt, output_tokens)


def _number(where: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_AT_S:
        raise WorkloadError(f"{where}: {name} {value!r} must be a number of seconds up to {MAX_AT_S:g}")
    return float(value)


def _gaps(rows: tuple[TraceRow, ...]) -> list[float]:
    """The gap before each row with mean 1; the first row's is the mean, since what was before it is unknown."""
    gaps = [b.at_s - a.at_s for a, b in itertools.pairwise(rows)]
    mean = math.fsum(gaps) / len(gaps) if gaps else 0.0
    return [1.0, *(gap / mean for gap in gaps)] if mean > 0 else [1.0] * len(rows)
