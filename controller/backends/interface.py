"""The contract of a backend: where replicas run. One implementation a kind of place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from sqlalchemy.orm import Session

from trimtab.engine.contract import Configuration, RequestRecord


class ReplicaRole(StrEnum):
    REPLICA = "replica"  # may take users' requests
    TRIAL = "trial"  # never does
    ENVOY = "envoy"


class ReplicaState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    LOST = "lost"  # crashed, did not start in time, or stopped answering


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """One engine process to be. ``inject`` is a labelled fault, ``None`` in every honest one."""

    role: ReplicaRole
    label: str
    configuration: Configuration
    inject: str | None = None


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """``reason`` says why a replica is lost; empty otherwise. ``num_in_flight`` is ``None`` when unknown.

    ``answers`` is ``False`` after a missed probe: whoever asks it more would wait, and hold up what must be done.
    """

    state: ReplicaState
    reason: str
    num_in_flight: int | None
    answers: bool = True


class Backend(Protocol):
    """Starts, watches and ends replicas by the id of their stored row."""

    def start(self, spec: ReplicaSpec, on_record: Callable[[Session, int], None]) -> int:
        """Starts a replica and returns its id.

        ``on_record`` runs in the transaction that records it, before it is executed, so that whoever asked for it
        refers to it in the same write. Raises ``EngineStartError``.
        """
        ...

    async def status(self, process_id: int) -> ReplicaStatus:
        """What the replica is doing now."""
        ...

    async def records(self, process_id: int, since_unix_s: float) -> list[RequestRecord] | None:
        """Finished requests since then, oldest first; ``None`` when they cannot be read or some are gone."""
        ...

    async def stop(self, process_id: int, grace_s: float) -> None:
        """Drains a replica for up to ``grace_s`` and ends it; returns when it is gone."""
        ...

    def running(self) -> dict[int, str]:
        """Maps the id of each engine process not known to have ended to its role."""
        ...
