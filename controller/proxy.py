"""Keeps the target's Envoy running: started when it is missing, recorded like every other process."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from trimtab.controller.backends.interface import ReplicaRole
from trimtab.controller.backends.local import process_of, record_process
from trimtab.controller.restarts import MAX_DELAY_S, Restarts
from trimtab.controller.store.store import Store
from trimtab.controller.store.tables import ProcessRow, TargetRow
from trimtab.controller.traffic.envoy import EnvoySplit
from trimtab.engine.process import ProcessSpec, is_running, reap, spawn

_ENVOY = "envoy"


class Proxy:
    """The Envoy process of one target, listening for users on loopback ``port``."""

    def __init__(self, store: Store, split: EnvoySplit, target: str, port: int, logs: Path) -> None:
        self._store = store
        self._split = split
        self._target = target
        self._port = port
        self._logs = logs
        self._restarts = Restarts(store.now)

    def ensure(self) -> None:
        """Starts Envoy unless the recorded one runs, less often when it keeps ending.

        Its files keep the weights that were last in force.
        """
        with self._store.read() as session:
            target = session.get_one(TargetRow, self._target)
            row = session.get(ProcessRow, target.envoy_process_id) if target.envoy_process_id else None
        if row is not None:
            if row.ended_unix_s is None and is_running(process_of(row)):
                if self._store.now() - row.started_unix_s > MAX_DELAY_S:
                    self._restarts.ready(_ENVOY)
                return
            if row.ended_unix_s is None:
                reap(process_of(row))
                with self._store.write() as session:
                    session.get_one(ProcessRow, row.id).ended_unix_s = self._store.now()
            self._restarts.lost(_ENVOY, row.id)
            if not self._restarts.may_start(_ENVOY):
                return
        log_path = self._logs / "envoy.log"
        new = ProcessRow(
            role=ReplicaRole.ENVOY,
            label="Envoy",
            log_path=str(log_path),
            cpus=[],
            base_url="",
            admin_url="",
            admin_token="",
            model="",
            configuration={},
            inject=None,
        )

        def refer(session: Session, process_id: int) -> None:
            session.get_one(TargetRow, self._target).envoy_process_id = process_id

        spec = ProcessSpec(self._split.command(self._port), {}, (), log_path)
        spawn(spec, lambda made: record_process(self._store, new, made, refer))


def running_processes(store: Store) -> list[ProcessRow]:
    """Every recorded process that is alive, engines first and Envoy last: the order in which to end them."""
    with store.read() as session:
        rows = session.scalars(select(ProcessRow).where(ProcessRow.ended_unix_s.is_(None))).all()
    alive = [row for row in rows if is_running(process_of(row))]
    return sorted(alive, key=lambda row: row.role == ReplicaRole.ENVOY)
