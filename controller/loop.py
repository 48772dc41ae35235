"""The main loop of one target: observe, decide, search, canary, record, again and again.

Each turn is level-triggered: it reads what is stored and does the next thing. The slow work (an experiment) runs in a
task of its own, so that rollouts and replicas are looked after meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog
from sqlalchemy import select

from trimtab.controller.rollout.reconcile import Reconciler
from trimtab.controller.rollout.repository import RolloutRequest, Rollouts
from trimtab.controller.schedule import is_due
from trimtab.controller.store.decisions import DecisionNote
from trimtab.controller.store.store import Store
from trimtab.controller.store.tables import ExperimentRow, TargetRow
from trimtab.controller.telemetry.source import MetricsSource
from trimtab.controller.telemetry.window import TrafficWindow
from trimtab.controller.tuner import Tuner, Winner
from trimtab.engine.contract import Configuration, KnobCatalogue, KnobValue
from trimtab.errors import ExperimentError, MetricsError, RolloutError, TrimtabError
from trimtab.policies.manifest import TuningPolicy

log = structlog.get_logger(__name__)

TURN_PERIOD_S = 0.5
OBSERVE_PERIOD_S = 5.0


@dataclass(frozen=True, slots=True)
class LoopParts:
    """What the loop works with; ``controller.wiring`` supplies it."""

    store: Store
    target: str
    catalogue: KnobCatalogue
    reconciler: Reconciler
    rollouts: Rollouts
    tuner: Tuner
    source: MetricsSource
    announce_replicas: Callable[[], None]  # writes the file from which Prometheus learns what to scrape


@dataclass(frozen=True, slots=True)
class LoopStatus:
    """What the loop knows beyond the store. ``problem`` is what the last turn could not do, for people."""

    target: str
    serving: bool
    traffic: TrafficWindow | None
    problem: str | None


class ControlLoop:
    """One target's loop, and what the console may ask of it."""

    def __init__(self, parts: LoopParts) -> None:
        self.store = parts.store
        self.rollouts = parts.rollouts
        self.tuner = parts.tuner
        self._parts = parts
        self._target = parts.target
        self._traffic: TrafficWindow | None = None
        self._problem: str | None = None
        self._started_unix_s = parts.store.now()

    async def run(self, stop: asyncio.Event) -> None:
        """Turns until ``stop``; a turn that fails is told and tried again."""
        observing = asyncio.create_task(self._observe(stop))  # a slow source must not hold up a rollback
        self.tuner.resume()
        while not stop.is_set():
            moved = False
            try:
                moved = await self._turn()
                self._problem = None
            except TrimtabError as error:
                if str(error) != self._problem:
                    log.error("turn failed", error=str(error))
                self._problem = str(error)
            except Exception as error:
                log.exception("a fault in the controller")
                self._problem = f"a fault in the controller ({type(error).__name__}: {error}); see its log"
            if not moved:
                await _wait(stop, TURN_PERIOD_S)
        await observing
        await self.tuner.interrupt()

    async def _turn(self) -> bool:
        """One turn; returns whether the rollout moved on, so that the next one follows at once."""
        moved = await self._parts.reconciler.pass_once()
        self._decide()
        winner = self.tuner.winner()
        if winner is not None and self.rollouts.active() is None:
            self._promote(winner)
        return moved

    async def _observe(self, stop: asyncio.Event) -> None:
        """Reads the live figures again and again; missing ones are shown as missing."""
        while not stop.is_set():
            try:
                self._parts.announce_replicas()
                self._traffic = await self._parts.source.window()
            except MetricsError as error:
                self._traffic = None
                log.warning("no live figures", error=str(error))
            except Exception:
                self._traffic = None
                log.exception("a fault in the controller")
            await _wait(stop, OBSERVE_PERIOD_S)

    def _decide(self) -> None:
        """Starts an experiment when the policy's schedule is due and nothing else is under way."""
        triggers = self._policy().spec.triggers
        if triggers.schedule is None or self.tuner.is_busy() or self.rollouts.active() is not None:
            return
        with self.store.read() as session:
            newest = session.scalars(select(ExperimentRow).order_by(ExperimentRow.id.desc()).limit(1)).first()
        last_unix_s = newest.started_unix_s if newest else self._started_unix_s
        cooled = newest is None or self.store.now() - last_unix_s >= triggers.cooldown
        if cooled and is_due(triggers.schedule, last_unix_s, self.store.now()):
            self.start_experiment("schedule")

    def _promote(self, winner: Winner) -> None:
        """Starts the canary of an experiment's winner, or tells a person how to where the policy wants one."""
        stable, note = self._stable(), None
        if winner.configuration != stable and self._policy().spec.rollout.approval == "manual":
            note = _waiting(self._target, winner, stable)
        elif winner.configuration != stable:
            origin = f"experiment {winner.experiment_id}"
            # A kill before the last line below must start nothing twice, not even after that rollout's end.
            if all(rollout.origin != origin for rollout in self.rollouts.all()):
                self.rollouts.start(RolloutRequest(winner.configuration, origin, "loop"))
        self.tuner.settle(winner, note)

    def start_rollout(self, configuration: Configuration, origin: str, *, inject: str | None) -> int:
        """Starts a person's rollout and returns its id.

        Raises:
            RolloutError: the configuration has not passed the offline gate, or a rollout is under way.
        """
        if self.tuner.is_busy():
            raise RolloutError("an experiment is running; wait for its end")
        gate = self.tuner.gate(configuration.id)
        if gate is None:
            raise RolloutError(
                f"configuration {configuration.id} has not been through the offline gate; check it first"
            )
        if not gate.passed:
            reason = gate.detail["reason"]
            raise RolloutError(f"configuration {configuration.id} failed the offline gate: {reason}")
        return self.rollouts.start(RolloutRequest(configuration, origin, "person", inject))

    def configuration(self, knobs: Mapping[str, KnobValue]) -> Configuration:
        """``knobs`` on top of the stable configuration. Raises ``KnobError``."""
        return self._parts.catalogue.configuration(knobs, base=self._stable())

    def status(self) -> LoopStatus:
        return LoopStatus(self._target, self._parts.reconciler.serving, self._traffic, self._problem)

    def start_experiment(self, trigger: str) -> int:
        """Starts a search and returns its id. Raises ``ExperimentError`` while something else is under way."""
        self._refuse_during_a_rollout()
        return self.tuner.start(trigger)

    def start_gate(self, configuration: Configuration) -> None:
        """Starts the offline gate of a configuration; ``tuner.gate`` has its outcome. Raises ``ExperimentError``."""
        self._refuse_during_a_rollout()
        self.tuner.start_gate(configuration)

    def _refuse_during_a_rollout(self) -> None:
        active = self.rollouts.active()
        if active is not None:
            raise ExperimentError(f"rollout {active.id} is {active.phase}: trials would disturb it; wait for its end")

    def _stable(self) -> Configuration:
        with self.store.read() as session:
            return self._parts.catalogue.configuration(session.get_one(TargetRow, self._target).stable_configuration)

    def _policy(self) -> TuningPolicy:
        with self.store.read() as session:
            return TuningPolicy.model_validate(session.get_one(TargetRow, self._target).policy_manifest)


def _waiting(target: str, winner: Winner, stable: Configuration) -> DecisionNote:
    knobs = " ".join(f"--set {name}={value}" for name, (value, _) in winner.configuration.changed(stable).items())
    sentence = (
        f"{winner.configuration.id} won experiment {winner.experiment_id} and waits for a person, as the policy's "
        f"approval says: trimtab rollout start {knobs}"
    )
    return DecisionNote("loop", f"target {target}", "winner_waits", sentence, {"winner": dict(winner.configuration)})


async def _wait(stop: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except TimeoutError:
        return
