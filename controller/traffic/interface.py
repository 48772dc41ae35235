"""The contract of traffic splitting: arms with weights in, shares of requests out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Route:
    """One replica that may receive requests. ``weight`` is in percent; the routes of a split add up to 100."""

    name: str
    host: str
    port: int
    weight: int


class TrafficSplit(Protocol):
    """Moves requests between replicas without a restart or a dropped connection."""

    async def apply(self, routes: Sequence[Route]) -> None:
        """Puts the weights in force; returns once the proxy has confirmed them.

        Routes of weight 0 stay reachable for the requests they already have. Raises ``TrafficError``.
        """
        ...

    async def is_ready(self) -> bool:
        """Whether the proxy accepts users' connections now."""
        ...
