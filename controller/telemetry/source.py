"""Where live figures come from: one interface. ``direct`` scrapes the replicas, ``prometheus`` asks a server."""

from __future__ import annotations

from typing import Protocol

from trimtab.controller.telemetry.window import TrafficWindow


class MetricsSource(Protocol):
    """Live figures of one target."""

    async def window(self) -> TrafficWindow | None:
        """Traffic of the last window; ``None`` until there are two readings. Raises ``MetricsError``."""
        ...
