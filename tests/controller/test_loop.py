"""The main loop's decisions over a real store: when it searches, when it rolls out, how it tells trouble.

What the loop drives (engines, Envoy, trials) is recorded here; ``tests/e2e`` runs the whole with real ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
import yaml

from trimtab.controller.loop import ControlLoop, LoopParts
from trimtab.controller.rollout.machine import Phase
from trimtab.controller.rollout.repository import RolloutRequest, Rollouts
from trimtab.controller.store.decisions import DecisionNote
from trimtab.controller.store.store import Store
from trimtab.controller.store.tables import ExperimentRow
from trimtab.controller.targets import put_target
from trimtab.controller.tuner import Winner
from trimtab.engine.adapters.embedded import CATALOGUE
from trimtab.errors import ExperimentError, MetricsError, RolloutError, TrafficError
from trimtab.policies.manifest import TunedEngine, TuningPolicy

HOUR_S = 3600.0
INT4 = CATALOGUE.configuration({"quantization": "int4"})
STABLE = CATALOGUE.configuration({"quantization": "fp32"})
CHAT = yaml.safe_load((files("trimtab.policies") / "presets/chat.yaml").read_text())
TARGET = {
    "apiVersion": "trimtab.dev/v1alpha1",
    "kind": "TunedEngine",
    "metadata": {"name": "chat"},
    "spec": {"policy": "chat", "model": "m", "port": 8100, "configuration": {"quantization": "fp32"}},
}


class RecordedTuner:
    """Stands where experiments would run: keeps what it was asked."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.settled: list[Winner] = []
        self.waiting: Winner | None = None
        self.busy = False
        self.note: DecisionNote | None = None

    def is_busy(self) -> bool:
        return self.busy

    def start(self, trigger: str) -> int:
        self.started.append(trigger)
        return len(self.started)

    def winner(self) -> Winner | None:
        return self.waiting

    def settle(self, winner: Winner, note: DecisionNote | None) -> None:
        self.settled.append(winner)
        self.note = note
        self.waiting = None

    def gate(self, configuration_id: str) -> None:
        return None

    def resume(self) -> None: ...

    async def interrupt(self) -> None: ...


class World:
    """A loop, its clock, and what it drives."""

    def __init__(self, folder: Path, *, schedule: str | None = None, approval: str = "automatic") -> None:
        self.now_s = 1_000_000_000.0  # 2001-09-09 01:46:40 UTC
        self.store = Store.open(folder, lambda: self.now_s)
        spec = CHAT["spec"] | {"triggers": {"schedule": schedule, "cooldown": "2h"}}
        spec["rollout"] = CHAT["spec"]["rollout"] | {"approval": approval}
        policy, target = TuningPolicy.model_validate(CHAT | {"spec": spec}), TunedEngine.model_validate(TARGET)
        put_target(self.store, target, policy, folder, CATALOGUE)
        self.tuner = RecordedTuner()
        self.rollouts = Rollouts(self.store, "chat", CATALOGUE)
        self.serving = True
        self.fault: BaseException | None = None
        self.figures_missing = False
        parts = LoopParts(
            self.store,
            "chat",
            CATALOGUE,
            self,
            self.rollouts,
            self.tuner,
            self,
            lambda: None,  # type: ignore[arg-type]
        )
        self.loop = ControlLoop(parts)

    async def pass_once(self) -> bool:
        if self.fault is not None:
            raise self.fault
        return False

    async def window(self) -> None:
        if self.figures_missing:
            raise MetricsError("replica does not answer")

    async def turn(self) -> None:
        """One turn of the real ``run``."""
        stop = asyncio.Event()
        running = asyncio.create_task(self.loop.run(stop))
        for _ in range(5):
            await asyncio.sleep(0)
        stop.set()
        await running

    def experiment(self, started_unix_s: float) -> None:
        with self.store.write() as session:
            session.add(
                ExperimentRow(
                    target="chat", state="finished", trigger="manual", study="s", started_unix_s=started_unix_s
                )
            )


@pytest.fixture
def made(tmp_path: Path) -> Iterator[list[World]]:
    worlds: list[World] = []
    yield worlds
    for world in worlds:
        world.store.close()


@pytest.fixture
def world(tmp_path: Path, made: list[World]) -> World:
    made.append(World(tmp_path))
    return made[0]


@pytest.fixture
def hourly(tmp_path: Path, made: list[World]) -> World:
    made.append(World(tmp_path, schedule="0 * * * *"))
    return made[0]


async def test_nothing_starts_without_a_schedule(world: World) -> None:
    world.now_s += 24 * HOUR_S
    await world.turn()
    assert world.tuner.started == []


async def test_a_schedule_starts_a_search_when_it_comes_due(hourly: World) -> None:
    await hourly.turn()
    assert hourly.tuner.started == []
    hourly.now_s += HOUR_S
    await hourly.turn()
    assert hourly.tuner.started == ["schedule"]


async def test_the_cooldown_holds_a_due_schedule_back(hourly: World) -> None:
    hourly.experiment(hourly.now_s)
    hourly.now_s += 1.9 * HOUR_S
    await hourly.turn()
    assert hourly.tuner.started == []
    hourly.now_s += 0.2 * HOUR_S
    await hourly.turn()
    assert hourly.tuner.started == ["schedule"]


async def test_a_schedule_waits_for_a_running_search_and_for_a_rollout(hourly: World) -> None:
    hourly.now_s += HOUR_S
    hourly.tuner.busy = True
    await hourly.turn()
    hourly.tuner.busy = False
    hourly.rollouts.start(RolloutRequest(INT4, "test", "person"))
    await hourly.turn()
    assert hourly.tuner.started == []
    with pytest.raises(ExperimentError, match="rollout 1 is starting"):
        hourly.loop.start_experiment("manual")


async def test_a_winner_is_rolled_out_and_settled(world: World) -> None:
    world.tuner.waiting = Winner(INT4, 7)
    await world.turn()
    active = world.rollouts.active()
    assert active is not None
    assert (active.configuration, active.phase, active.inject) == (dict(INT4), Phase.STARTING, None)
    assert [w.experiment_id for w in world.tuner.settled] == [7]


async def test_a_winner_waits_while_another_rollout_is_under_way(world: World) -> None:
    world.rollouts.start(RolloutRequest(CATALOGUE.configuration({"quantization": "int8"}), "test", "person"))
    world.tuner.waiting = Winner(INT4, 7)
    await world.turn()
    assert world.tuner.settled == []
    assert len(world.rollouts.all()) == 1


async def test_a_policy_with_manual_approval_starts_no_rollout_and_says_how_a_person_can(
    tmp_path: Path, made: list[World]
) -> None:
    made.append(World(tmp_path, approval="manual"))
    made[0].tuner.waiting = Winner(INT4, 7)
    await made[0].turn()
    assert made[0].rollouts.all() == []
    assert len(made[0].tuner.settled) == 1
    assert made[0].tuner.note is not None
    assert made[0].tuner.note.sentence.endswith("trimtab rollout start --set quantization=int4")


async def test_a_winner_that_is_stable_already_starts_nothing(world: World) -> None:
    world.tuner.waiting = Winner(STABLE, 7)
    await world.turn()
    assert world.rollouts.all() == []
    assert len(world.tuner.settled) == 1


async def test_a_configuration_without_a_passed_gate_is_never_rolled_out(world: World) -> None:
    with pytest.raises(RolloutError, match="has not been through the offline gate"):
        world.loop.start_rollout(INT4, "test", inject=None)
    assert world.rollouts.all() == []


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (TrafficError("Envoy does not answer"), "Envoy does not answer"),
        (KeyError("x"), "a fault in the controller (KeyError: 'x'); see its log"),
    ],
)
async def test_trouble_is_told_until_a_turn_works_again(world: World, fault: Exception, told: str) -> None:
    world.fault = fault
    await world.turn()
    assert world.loop.status().problem == told
    world.fault = None
    await world.turn()
    assert world.loop.status().problem is None


async def test_missing_figures_are_shown_as_missing_and_stop_nothing(world: World) -> None:
    world.figures_missing = True
    world.tuner.waiting = Winner(INT4, 7)
    await world.turn()
    assert world.loop.status().traffic is None
    assert world.loop.status().problem is None
    assert world.rollouts.active() is not None
