"""The reconciler over a real store, when the world is not as wanted. ``tests/e2e`` runs it with real engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path

import pytest
import yaml
from sqlalchemy.orm import Session

from trimtab.controller.backends.interface import ReplicaRole, ReplicaSpec, ReplicaState, ReplicaStatus
from trimtab.controller.rollout.machine import Arm, Phase
from trimtab.controller.rollout.reconcile import Parts, Reconciler
from trimtab.controller.rollout.repository import RolloutRequest, Rollouts
from trimtab.controller.store.store import Store
from trimtab.controller.store.tables import ProcessRow, RolloutRow, TargetRow
from trimtab.controller.traffic.interface import Route
from trimtab.engine.adapters.embedded import CATALOGUE
from trimtab.engine.contract import RequestRecord

CHAT = yaml.safe_load((files("trimtab.policies") / "presets/chat.yaml").read_text())


class World:
    """A target whose replicas are in the states that a test says, and a proxy that takes every weight."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 1000.0
        self.store = Store.open(folder, lambda: self.now_s)
        with self.store.write() as session:
            session.add(
                TargetRow(
                    name="chat",
                    target_manifest={},
                    policy_manifest=CHAT,
                    manifest_folder="/",
                    stable_configuration=dict(CATALOGUE.configuration({})),
                )
            )
        self.rollouts = Rollouts(self.store, "chat", CATALOGUE)
        self.states: dict[int, ReplicaState] = {}
        self.start_as = ReplicaState.READY
        self.weights: dict[str, int] = {}
        parts = Parts(self.store, self, self, self.rollouts, CATALOGUE, lambda: None)
        self.reconciler = Reconciler(parts, "chat")

    def start(self, spec: ReplicaSpec, on_record: Callable[[Session, int], None]) -> int:
        row = ProcessRow(
            role=spec.role,
            label=spec.label,
            pid=1,
            start_ticks=1,
            nonce="n",
            log_path="",
            cpus=[],
            base_url=f"http://127.0.0.1:{9000 + len(self.states)}",
            admin_url="",
            admin_token="",
            model="m",
            configuration={},
            inject=None,
            started_unix_s=self.now_s,
        )
        with self.store.write() as session:
            session.add(row)
            session.flush()
            on_record(session, row.id)
        self.states[row.id] = self.start_as
        return row.id

    async def status(self, process_id: int) -> ReplicaStatus:
        return ReplicaStatus(self.states[process_id], "", 0)

    async def records(self, process_id: int, since_unix_s: float) -> list[RequestRecord] | None:
        return []

    async def stop(self, process_id: int, grace_s: float) -> None:
        self.states[process_id] = ReplicaState.LOST

    def running(self) -> dict[int, str]:
        alive = [key for key, state in self.states.items() if state is not ReplicaState.LOST]
        return dict.fromkeys(alive, ReplicaRole.REPLICA)

    async def apply(self, routes: Sequence[Route]) -> None:
        self.weights = {route.name: route.weight for route in routes}

    async def is_ready(self) -> bool:
        return True

    async def passes(self, num: int) -> None:
        for _ in range(num):
            await self.reconciler.pass_once()
            self.now_s += 1.0

    def enter(self, phase: Phase) -> dict[Arm, int]:
        """Puts the rollout into ``phase`` and returns the process of each arm."""
        with self.store.write() as session:
            row = session.get_one(RolloutRow, 1)
            row.phase = phase
            stable = session.get_one(TargetRow, "chat").stable_process_id
            arms = {Arm.STABLE: stable, Arm.CANARY: row.canary_process_id, Arm.BASELINE: row.baseline_process_id}
        return {arm: process_id for arm, process_id in arms.items() if process_id is not None}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    made.rollouts.start(RolloutRequest(CATALOGUE.configuration({"quantization": "int4"}), "test", "person"))
    yield made
    made.store.close()


@pytest.mark.parametrize(
    ("phase", "busy", "stand_in", "end"),
    [
        (Phase.PROMOTING, Arm.CANARY, Arm.STABLE, Phase.SUCCEEDED),
        (Phase.ROLLING_BACK, Arm.STABLE, Arm.BASELINE, Phase.ROLLED_BACK),
    ],
)
async def test_a_rollout_does_not_end_while_an_arm_stands_in(
    world: World, phase: Phase, busy: Arm, stand_in: Arm, end: Phase
) -> None:
    await world.passes(2)
    arms = world.enter(phase)
    world.states[arms[busy]] = ReplicaState.STARTING
    await world.passes(5)
    assert world.weights[f"replica-{arms[stand_in]}"] == 100
    assert world.rollouts.get(1).phase == phase
    world.states[arms[busy]] = ReplicaState.READY
    await world.passes(5)
    assert world.rollouts.get(1).phase == end


async def test_a_lost_stable_replica_is_replaced_at_once(world: World) -> None:
    await world.passes(2)
    arms = world.enter(Phase.STEPPING)
    world.states[arms[Arm.STABLE]] = ReplicaState.LOST
    num_before = len(world.states)
    await world.passes(2)
    assert len(world.states) == num_before + 1


async def test_a_replica_that_cannot_start_is_tried_less_and_less_often(world: World) -> None:
    await world.passes(2)
    arms = world.enter(Phase.ROLLING_BACK)
    world.start_as = world.states[arms[Arm.STABLE]] = ReplicaState.LOST
    num_before = len(world.states)
    await world.passes(600)
    assert 10 <= len(world.states) - num_before <= 18  # 1, 2, 4, ... 32 and then 60 seconds apart
    world.start_as = ReplicaState.READY
    await world.passes(62)
    assert world.weights == {f"replica-{max(world.states)}": 100}
