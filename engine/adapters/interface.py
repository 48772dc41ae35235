"""What an adapter answers about its engine. The contract; each adapter is a file beside this one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import aiohttp

from trimtab.engine.contract import (
    Configuration,
    EngineEndpoint,
    KnobCatalogue,
    KnobValue,
    MetricNames,
    RequestRecord,
)


@dataclass(frozen=True, slots=True)
class Launch:
    """One engine process to be: everything its command line needs."""

    model_path: Path
    model_name: str
    configuration: Configuration
    port: int
    admin_port: int
    admin_token: str
    inject: str | None = None  # a labelled fault, such as slow_decode=3; None in every honest launch


@dataclass(frozen=True, slots=True)
class Command:
    """An argument list and the environment it adds."""

    argv: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class DrainState:
    """Whether the engine refuses new requests, and how many it still serves (queued or running)."""

    draining: bool
    num_in_flight: int


@dataclass(frozen=True, slots=True)
class RecordPage:
    """Records after a cursor. ``num_dropped`` counts those that the engine's ring had already forgotten."""

    records: tuple[RequestRecord, ...]
    next_cursor: int
    num_dropped: int


class EngineAdapter(Protocol):
    """Everything Trimtab knows about one engine."""

    @property
    def catalogue(self) -> KnobCatalogue: ...

    @property
    def metric_names(self) -> MetricNames: ...

    @property
    def memory_exit_codes(self) -> tuple[int, ...]:
        """The exit codes by which this engine says that memory ran out."""
        ...

    def command(self, launch: Launch) -> Command:
        """The command line that starts this engine with ``launch.configuration``."""
        ...

    def client(self, http: aiohttp.ClientSession, endpoint: EngineEndpoint) -> EngineClient:
        """Calls to one running engine."""
        ...


class EngineClient(Protocol):
    """Calls to one running engine. Each raises ``EngineCallError`` when the engine does not answer as it should."""

    async def is_ready(self) -> bool:
        """Whether it takes requests now. ``False`` (no error) while nothing listens."""
        ...

    async def set_live_knobs(self, values: Mapping[str, KnobValue]) -> Configuration:
        """Changes live knobs at a step boundary and returns the configuration now in force."""
        ...

    async def set_draining(self, draining: bool) -> DrainState:
        """Starts or stops draining and returns the state."""
        ...

    async def drain_state(self) -> DrainState:
        """How many requests are in flight, and whether new ones are refused."""
        ...

    async def records_since(self, cursor: int) -> RecordPage:
        """Per-request records after ``cursor`` (0: from the oldest kept)."""
        ...
