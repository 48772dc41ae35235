"""What a workload is to everyone who replays it: planned requests on a clock that can be scaled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to be. ``at_s`` counts from the start of the load; the output length is pinned."""

    index: int
    at_s: float
    prompt: str
    output_tokens: int


class Workload(Protocol):
    """Arrivals × shapes × text. The same workload always plans the same requests."""

    @property
    def rate_per_s(self) -> float:
        """Mean arrivals per second."""
        ...

    @property
    def content_known(self) -> bool:
        """Whether the text is the users' or was supplied by the policy, so that content-dependent knobs may be
        decided on it."""
        ...

    def requests(self, duration_s: float) -> tuple[PlannedRequest, ...]:
        """The requests whose arrival lies in ``[0, duration_s)``, in order."""
        ...

    def at_rate(self, rate_per_s: float) -> Workload:
        """The same requests on a clock scaled to ``rate_per_s``."""
        ...

    def held_out(self, seed: int) -> Workload:
        """Other traffic of the same kind, disjoint from this one's, another for each seed."""
        ...

    def describe(self) -> str:
        """One line for reports: kind, rate, shapes, seed."""
        ...
