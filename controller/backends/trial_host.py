"""Trial engines on this machine for ``experiments``: recorded like replicas, on the cores set aside for trials."""

from __future__ import annotations

import asyncio

from trimtab.controller.backends.interface import ReplicaRole, ReplicaSpec, ReplicaState
from trimtab.controller.backends.local import LocalBackend, endpoint_of
from trimtab.engine.contract import Configuration
from trimtab.errors import EngineStartError
from trimtab.experiments.ports import HostedEngine

POLL_S = 0.1
STOP_GRACE_S = 5.0  # nobody waits for a trial's answers


class TrialHost:
    """Implements ``experiments.ports.EngineHost`` over the local backend."""

    def __init__(self, backend: LocalBackend) -> None:
        self._backend = backend

    async def start(self, configuration: Configuration, *, label: str) -> HostedEngine:
        spec = ReplicaSpec(ReplicaRole.TRIAL, label, configuration)
        process_id = self._backend.start(spec, lambda _session, _id: None)
        try:
            while (status := await self._backend.status(process_id)).state is ReplicaState.STARTING:
                await asyncio.sleep(POLL_S)
        except BaseException:
            await self._backend.stop(process_id, 0.0)
            raise
        if status.state is ReplicaState.LOST:
            code = self._backend.exit_code(process_id)
            await self._backend.stop(process_id, 0.0)
            raise EngineStartError(status.reason, exit_code=code)
        row = self._backend.row(process_id)
        return HostedEngine(endpoint_of(row), configuration, str(process_id), tuple(row.cpus))

    async def stop(self, engine: HostedEngine) -> None:
        await self._backend.stop(int(engine.id), STOP_GRACE_S)

    def exit_code(self, engine: HostedEngine) -> int | None:
        return self._backend.exit_code(int(engine.id))

    async def end_leftovers(self) -> None:
        """Ends trial engines that a killed controller left behind."""
        for process_id, role in self._backend.running().items():
            if role == ReplicaRole.TRIAL:
                await self._backend.stop(process_id, 0.0)
