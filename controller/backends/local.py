"""Replicas as detached processes on this machine, each recorded before it is executed and adopted after a restart."""

from __future__ import annotations

import asyncio
import math
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from sqlalchemy import select
from sqlalchemy.orm import Session

from trimtab.controller.backends.interface import ReplicaRole, ReplicaSpec, ReplicaState, ReplicaStatus
from trimtab.controller.cores import CoreSets
from trimtab.controller.store.store import Store
from trimtab.controller.store.tables import ProcessRow
from trimtab.engine.adapters.interface import EngineAdapter, EngineClient, Launch
from trimtab.engine.contract import EngineEndpoint, RequestRecord
from trimtab.engine.process import ProcessRecord, ProcessSpec, exit_code, is_running, spawn, terminate
from trimtab.errors import EngineCallError

START_TIMEOUT_S = 120.0
# A busy engine may miss one probe; three in a row (half a second apart) are a lost readiness.
MISSED_PROBES = 3
LOG_TAIL_LINES = 3


@dataclass(frozen=True, slots=True)
class ModelOnDisk:
    """The model that every replica of a target serves."""

    path: Path
    name: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where this backend's replicas run: on which cores, with which model, logging where."""

    model: ModelOnDisk
    cores: CoreSets
    logs: Path


@dataclass(slots=True)
class _Seen:
    """What this controller process has seen of a replica; rebuilt by looking after a restart."""

    was_ready: bool = False
    misses: int = 0
    cursor: int = 0
    records: list[RequestRecord] = field(default_factory=list)
    whole_since_unix_s: float = -math.inf  # the engine may have dropped records of before


class LocalBackend:
    """The local backend of one target."""

    def __init__(self, store: Store, adapter: EngineAdapter, http: aiohttp.ClientSession, place: Place) -> None:
        self._store = store
        self._adapter = adapter
        self._http = http
        self._logs = place.logs
        self._model = place.model
        self._cores = place.cores
        self._seen: dict[int, _Seen] = {}

    def start(self, spec: ReplicaSpec, on_record: Callable[[Session, int], None]) -> int:
        port, admin_port = free_port(), free_port()
        token = secrets.token_urlsafe(32)
        command = self._adapter.command(
            Launch(
                self._model.path, self._model.name, spec.configuration, port, admin_port, token, inject=spec.inject
            )
        )
        cpus = self._free_cores(spec.role)
        log_path = self._logs / f"{spec.role}-{secrets.token_hex(4)}.log"
        row = ProcessRow(
            role=spec.role,
            label=spec.label,
            log_path=str(log_path),
            cpus=list(cpus),
            base_url=f"http://127.0.0.1:{port}",
            admin_url=f"http://127.0.0.1:{admin_port}",
            admin_token=token,
            model=self._model.name,
            configuration=dict(spec.configuration),
            inject=spec.inject,
        )
        spawn(
            ProcessSpec(command.argv, command.env, cpus, log_path),
            lambda made: record_process(self._store, row, made, on_record),
        )
        return row.id

    async def status(self, process_id: int) -> ReplicaStatus:
        row = self.row(process_id)
        seen = self._seen.setdefault(process_id, _Seen())
        if row.ended_unix_s is not None or not is_running(process_of(row)):
            return ReplicaStatus(ReplicaState.LOST, self._why_ended(row), 0)
        client = self._client(row)
        if await client.is_ready():
            seen.was_ready = True
            try:
                in_flight = (await client.drain_state()).num_in_flight
            except EngineCallError:
                return self._missed(row, seen)
            seen.misses = 0
            return ReplicaStatus(ReplicaState.READY, "", in_flight)
        if not seen.was_ready:
            if self._store.now() - row.started_unix_s > START_TIMEOUT_S:
                reason = f"the {row.label} was not ready within {START_TIMEOUT_S:g} s"
                return ReplicaStatus(ReplicaState.LOST, reason, None, answers=False)
            return ReplicaStatus(ReplicaState.STARTING, "", None, answers=False)
        return self._missed(row, seen)

    def _missed(self, row: ProcessRow, seen: _Seen) -> ReplicaStatus:
        """The status of a replica that was ready and did not answer a probe."""
        seen.misses += 1
        if seen.misses < MISSED_PROBES:
            return ReplicaStatus(ReplicaState.READY, "", None, answers=False)
        return ReplicaStatus(ReplicaState.LOST, f"the {row.label} lost its readiness", None, answers=False)

    async def records(self, process_id: int, since_unix_s: float) -> list[RequestRecord] | None:
        row = self.row(process_id)
        seen = self._seen.setdefault(process_id, _Seen())
        try:
            page = await self._client(row).records_since(seen.cursor)
        except EngineCallError:
            seen.misses += 1
            return None
        seen.cursor = page.next_cursor
        if page.num_dropped > 0:  # all of them had finished when the oldest that is left did
            seen.whole_since_unix_s = page.records[0].finished_unix_s if page.records else self._store.now()
        seen.records = [r for r in (*seen.records, *page.records) if r.finished_unix_s >= since_unix_s]
        return list(seen.records) if since_unix_s > seen.whole_since_unix_s else None

    async def stop(self, process_id: int, grace_s: float) -> None:
        row = self.row(process_id)
        await asyncio.to_thread(terminate, process_of(row), grace_s)
        with self._store.write() as session:
            ended = session.get_one(ProcessRow, process_id)
            ended.ended_unix_s = ended.ended_unix_s or self._store.now()
        self._seen.pop(process_id, None)

    def running(self) -> dict[int, str]:
        with self._store.read() as session:
            rows = session.scalars(
                select(ProcessRow).where(ProcessRow.ended_unix_s.is_(None), ProcessRow.role != ReplicaRole.ENVOY)
            )
            return {row.id: row.role for row in rows}

    def exit_code(self, process_id: int) -> int | None:
        """The exit code of a replica of this controller process that has ended; ``None`` when alive or unknown."""
        return exit_code(process_of(self.row(process_id)))

    def _client(self, row: ProcessRow) -> EngineClient:
        return self._adapter.client(self._http, endpoint_of(row))

    def _free_cores(self, role: ReplicaRole) -> tuple[int, ...]:
        """A slot that no running engine has; the first when all are taken (or are the same, by sharing)."""
        if role is ReplicaRole.TRIAL and self._cores.trial is not None:
            return self._cores.trial
        taken = {tuple(self.row(process_id).cpus) for process_id in self.running()}
        return next((slot for slot in self._cores.slots if slot not in taken), self._cores.slots[0])

    def row(self, process_id: int) -> ProcessRow:
        """The stored row of a replica."""
        with self._store.read() as session:
            return session.get_one(ProcessRow, process_id)

    def _why_ended(self, row: ProcessRow) -> str:
        code = exit_code(process_of(row))
        how = "ended" if code is None else f"ended with exit code {code}"
        tail = log_tail(Path(row.log_path), LOG_TAIL_LINES)
        return f"the {row.label} {how}" + (f": {tail}" if tail else "")


def record_process(
    store: Store, row: ProcessRow, made: ProcessRecord, on_record: Callable[[Session, int], None]
) -> None:
    """Writes ``row`` for the process ``made``, together with whatever refers to it."""
    row.pid, row.start_ticks, row.nonce = made.pid, made.start_ticks, made.nonce
    row.started_unix_s = store.now()
    with store.write() as session:
        session.add(row)
        session.flush()
        on_record(session, row.id)


def process_of(row: ProcessRow) -> ProcessRecord:
    return ProcessRecord(row.pid, row.start_ticks, row.nonce)


def endpoint_of(row: ProcessRow) -> EngineEndpoint:
    return EngineEndpoint(row.base_url, row.admin_url, row.admin_token, row.model)


def log_tail(path: Path, num_lines: int) -> str:
    """The last lines of a log, joined; empty when there are none."""
    try:
        with path.open("rb") as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - 4096))
            text = log.read().decode(errors="replace")
    except OSError:
        return ""
    return " | ".join(line.strip() for line in text.splitlines()[-num_lines:] if line.strip())


def free_port() -> int:
    """A loopback port that nothing listens on now. Whoever loses the race for it fails to start and is told so."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
