"""What experiments need from above: a host that starts trial engines. The controller's backend supplies it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from trimtab.engine.contract import Configuration, EngineEndpoint


@dataclass(frozen=True, slots=True)
class HostedEngine:
    """One running trial engine. ``id`` is the host's own name for it; ``cpus`` empty means any."""

    endpoint: EngineEndpoint
    configuration: Configuration
    id: str
    cpus: tuple[int, ...]


class EngineHost(Protocol):
    """Starts and ends trial engines: recorded processes, on cores of their own, adoptable after a crash."""

    async def start(self, configuration: Configuration, *, label: str) -> HostedEngine:
        """Returns once the engine is ready. A cancelled call leaves no process behind.

        Raises:
            EngineStartError: with the exit code (``None``: alive but not ready in time) and the log's tail.
        """
        ...

    async def stop(self, engine: HostedEngine) -> None:
        """Ends the engine. Does nothing when it has ended already."""
        ...

    def exit_code(self, engine: HostedEngine) -> int | None:
        """The exit code of an engine that has ended; negative: the signal. ``None`` while it runs."""
        ...
