"""What one load did, request by request. The generator fills these types; ``figures`` sums them up.

Times are seconds since the load's start on a monotonic clock. Every request that was sent has exactly one result.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from trimtab.experiments.workload.interface import PlannedRequest


class Outcome(StrEnum):
    SUCCEEDED = "succeeded"  # the whole answer arrived, at the pinned length
    REFUSED = "refused"  # 429 or 503: the server said "not now"
    FAILED = "failed"  # anything else; ``kind`` says what


@dataclass(frozen=True, slots=True)
class RequestResult:
    """One request. ``kind`` is ``None`` for a success; a failure's is one of ``connect``, ``disconnect``,
    ``http_STATUS``, ``stream`` (an error or nonsense in the stream), ``cut`` (it ended early), ``usage`` (no token
    counts), ``length`` (not the pinned length) or ``deadline`` (the load ended before it did)."""

    index: int
    intended_s: float
    sent_s: float
    first_token_s: float | None
    last_token_s: float | None
    prompt_tokens: int
    output_tokens: int
    itls_s: tuple[float, ...]
    outcome: Outcome
    kind: str | None

    @property
    def ttft_s(self) -> float | None:
        """From the intended arrival, so that a client that falls behind cannot hide a slow server."""
        return None if self.first_token_s is None else self.first_token_s - self.intended_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; ``None`` with fewer than two tokens."""
        if self.first_token_s is None or self.last_token_s is None or self.output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float | None:
        return None if self.last_token_s is None else self.last_token_s - self.intended_s


@dataclass(frozen=True, slots=True)
class LoadJob:
    """One load to be. ``drain_s`` is how long after the last arrival's window answers may still come."""

    base_url: str
    model: str
    requests: tuple[PlannedRequest, ...]
    rate_per_s: float
    duration_s: float
    drain_s: float


@dataclass(frozen=True, slots=True)
class LoadResult:
    """All results of one load. ``lag_s`` is how late the client itself was: the 99th percentile, over sends, of
    actual minus intended, or over the event loop's ticks, whichever is larger."""

    rate_per_s: float
    duration_s: float
    finished_s: float
    lag_s: float
    results: tuple[RequestResult, ...]
