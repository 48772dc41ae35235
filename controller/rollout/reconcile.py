"""Makes the world match the stored state of one target, again and again: the hands of the rollout machine.

``Reconciler.pass_once`` is level-triggered and safe to repeat: it reads the state, starts what is missing, moves the
weights, ends what nobody wants, looks, and stores at most one transition. A controller that was killed anywhere
starts again with the same pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import structlog
from sqlalchemy.orm import Session

from trimtab.controller.backends.interface import Backend, ReplicaRole, ReplicaSpec, ReplicaState, ReplicaStatus
from trimtab.controller.restarts import Restarts
from trimtab.controller.rollout.machine import (
    Arm,
    ArmState,
    Desired,
    Observation,
    Phase,
    RolloutState,
    advance,
    desired,
    is_judged,
)
from trimtab.controller.rollout.repository import Rollouts, process_ids, state_of
from trimtab.controller.store.store import Store
from trimtab.controller.store.tables import ProcessRow, RolloutRow, TargetRow
from trimtab.controller.traffic.interface import Route, TrafficSplit
from trimtab.engine.contract import KnobCatalogue
from trimtab.policies.judge import Look, Verdict, judge
from trimtab.policies.manifest import TuningPolicy

log = structlog.get_logger(__name__)

# Two quiet looks this far apart: a request that the proxy accepted before the weights moved has arrived by then.
QUIET_S = 1.0
# Streams longer than this are left to the replica's own drain when it is ended.
DRAIN_TIMEOUT_S = 600.0
# What a replica that is ended may take to finish what it has; a lost one serves nobody.
DRAIN_GRACE_S = 60.0
LOST_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class Parts:
    """What the reconciler works with; ``controller.wiring`` supplies it."""

    store: Store
    backend: Backend
    split: TrafficSplit
    rollouts: Rollouts
    catalogue: KnobCatalogue
    ensure_proxy: Callable[[], None]  # starts the traffic split's process when it does not run


class Reconciler:
    """The reconciler of one target."""

    def __init__(self, parts: Parts, target: str) -> None:
        self._parts = parts
        self._target = target
        self._applied: tuple[Route, ...] | None = None
        self._applied_unix_s = 0.0
        self._quiet_since: float | None = None
        self._restarts = Restarts(parts.store.now)
        self.serving = False  # whether the last pass found the weights in force

    async def pass_once(self) -> bool:
        """One pass; returns whether the state moved on. Raises what its parts raise; the caller tries again."""
        target, rollout = self._load()
        policy = TuningPolicy.model_validate(target.policy_manifest)
        state = state_of(rollout) if rollout else None
        wanted = desired(policy.spec.rollout, state) if state else Desired({Arm.STABLE: 100})
        self._parts.ensure_proxy()
        self._start_missing(target, rollout, wanted)
        target, rollout = self._load()
        statuses = await self._look_at_arms(target, rollout, wanted)
        weights = serving_weights(wanted, statuses)
        in_force = weights is not None and await self._move_weights(target, rollout, weights)
        self.serving = in_force
        if in_force:
            await self._end_unwanted(target, rollout, wanted)
        if rollout is None or state is None:
            return False
        # While a stand-in takes an arm's share nothing is compared, and no arm that should be empty is.
        as_wanted = in_force and weights == wanted.weights
        all_answer = all(status.answers for status in statuses.values())
        verdict = await self._judge(policy, rollout, state) if as_wanted and all_answer else None
        seen = self._observe(statuses, verdict, drained=as_wanted and self._drained(wanted, statuses, rollout))
        change = advance(policy.spec.rollout, state, seen)
        if change is not None and self._parts.rollouts.transition(rollout, change, verdict):
            log.info("rollout", rollout=rollout.id, phase=change.state.phase, sentence=change.sentence)
        return change is not None

    def _load(self) -> tuple[TargetRow, RolloutRow | None]:
        with self._parts.store.read() as session:
            target = session.get_one(TargetRow, self._target)
        return target, self._parts.rollouts.active()

    def _start_missing(self, target: TargetRow, rollout: RolloutRow | None, wanted: Desired) -> None:
        """Starts arms that have no process. A lost canary is never started again: the machine rolls it back."""
        comparing = rollout is not None and Phase(rollout.phase) in (Phase.STARTING, Phase.STEPPING)
        running = self._parts.backend.running()
        for arm, process_id in process_ids(target, rollout).items():
            gone = process_id is None or (arm is not Arm.CANARY and process_id not in running)
            may_start = (arm is Arm.STABLE or comparing) and self._restarts.may_start(arm)
            if arm in wanted.arms and gone and may_start:
                self._start_arm(target, rollout, arm)

    def _start_arm(self, target: TargetRow, rollout: RolloutRow | None, arm: Arm) -> None:
        canary = rollout if arm is Arm.CANARY else None
        spec = ReplicaSpec(
            ReplicaRole.REPLICA,
            f"{arm} of rollout {rollout.id}" if rollout and arm is not Arm.STABLE else f"{arm} replica",
            self._parts.catalogue.configuration(canary.configuration if canary else target.stable_configuration),
            canary.inject if canary else None,
        )

        def refer(session: Session, process_id: int) -> None:
            if rollout is None or arm is Arm.STABLE:
                session.get_one(TargetRow, self._target).stable_process_id = process_id
            elif arm is Arm.CANARY:
                session.get_one(RolloutRow, rollout.id).canary_process_id = process_id
            else:
                session.get_one(RolloutRow, rollout.id).baseline_process_id = process_id

        self._parts.backend.start(spec, refer)

    async def _look_at_arms(
        self, target: TargetRow, rollout: RolloutRow | None, wanted: Desired
    ) -> dict[Arm, ReplicaStatus]:
        arms = {a: p for a, p in process_ids(target, rollout).items() if a in wanted.arms and p is not None}
        # All at once: one that does not answer must not hold up the others.
        statuses = await asyncio.gather(*map(self._parts.backend.status, arms.values()))
        seen = dict(zip(arms, statuses, strict=True))
        for arm, process_id in arms.items():
            if seen[arm].state is ReplicaState.READY:
                self._restarts.ready(arm)
            if seen[arm].state is ReplicaState.LOST:
                if self._restarts.lost(arm, process_id):
                    log.warning("replica lost", arm=arm, reason=seen[arm].reason)
                await self._parts.backend.stop(process_id, LOST_GRACE_S)
        return seen

    async def _move_weights(self, target: TargetRow, rollout: RolloutRow | None, weights: Mapping[Arm, int]) -> bool:
        """Puts the weights in force; ``False`` while the proxy is not there."""
        if not await self._parts.split.is_ready():
            self._applied = None
            return False
        routes = tuple(self._routes(target, rollout, weights))
        if routes != self._applied:
            await self._parts.split.apply(routes)
            self._applied, self._applied_unix_s, self._quiet_since = routes, self._parts.store.now(), None
        return True

    def _routes(self, target: TargetRow, rollout: RolloutRow | None, weights: Mapping[Arm, int]) -> Iterator[Route]:
        with self._parts.store.read() as session:
            for arm, process_id in process_ids(target, rollout).items():
                if arm in weights and process_id is not None:
                    row = session.get_one(ProcessRow, process_id)
                    host, _, port = row.base_url.removeprefix("http://").partition(":")
                    yield Route(f"replica-{row.id}", host, int(port), weights[arm])

    async def _end_unwanted(self, target: TargetRow, rollout: RolloutRow | None, wanted: Desired) -> None:
        """Ends replicas that no arm refers to; the weights in force exclude them."""
        kept = {process_id for arm, process_id in process_ids(target, rollout).items() if arm in wanted.arms}
        for process_id, role in self._parts.backend.running().items():
            if role == ReplicaRole.REPLICA and process_id not in kept:
                log.info("ending a replica that no arm refers to", process=process_id)
                await self._parts.backend.stop(process_id, DRAIN_GRACE_S)

    async def _judge(self, policy: TuningPolicy, rollout: RolloutRow, state: RolloutState) -> Verdict | None:
        if not is_judged(policy.spec.rollout, state):
            return None
        # A controller that was killed begins the step's evidence anew: what it missed cannot be told from settling.
        since = max(state.entered_unix_s, self._applied_unix_s) + policy.spec.rollout.judge.settle
        arms = [
            await self._parts.backend.records(process_id, since) if process_id is not None else None
            for process_id in (rollout.canary_process_id, rollout.baseline_process_id)
        ]
        look = Look(state.step, since, self._parts.store.now(), arms[0], arms[1])
        verdict = judge(policy.spec.rollout, look)
        self._parts.rollouts.look(rollout.id, verdict)
        return verdict

    def _observe(self, statuses: dict[Arm, ReplicaStatus], verdict: Verdict | None, *, drained: bool) -> Observation:
        def state(arm: Arm) -> ArmState:
            return ArmState(statuses[arm].state) if arm in statuses else ArmState.STARTING

        reasons = [s.reason for arm, s in statuses.items() if arm is not Arm.STABLE and s.reason]
        return Observation(
            canary=state(Arm.CANARY),
            baseline=state(Arm.BASELINE),
            lost_reason="; ".join(reasons),
            drained=drained,
            verdict=verdict,
            now_unix_s=self._parts.store.now(),
        )

    def _drained(self, wanted: Desired, statuses: dict[Arm, ReplicaStatus], rollout: RolloutRow) -> bool:
        """Whether every arm of weight 0 has been without requests for a while, or has ended."""
        now = self._parts.store.now()
        if now - rollout.phase_entered_unix_s > DRAIN_TIMEOUT_S:
            return True
        idle = [status for arm, status in statuses.items() if not wanted.weights[arm]]
        if any(s.state is not ReplicaState.LOST and s.num_in_flight != 0 for s in idle):
            self._quiet_since = None
            return False
        self._quiet_since = now if self._quiet_since is None else self._quiet_since
        return now - self._quiet_since >= QUIET_S


def serving_weights(wanted: Desired, statuses: Mapping[Arm, ReplicaStatus]) -> dict[Arm, int] | None:
    """The wanted weights, with the share of an arm that is not ready given to stable, or else to the baseline.

    The canary never takes over another's share. ``None`` when no arm can take a share that must move.
    """
    ready = {arm for arm, status in statuses.items() if status.state is ReplicaState.READY}
    stand_in = next((arm for arm in (Arm.STABLE, Arm.BASELINE) if arm in ready), None)
    weights = dict.fromkeys(wanted.weights, 0)
    for arm, weight in wanted.weights.items():
        takes = arm if arm in ready else stand_in
        if weight and takes is None:
            return None
        if weight and takes is not None:
            weights[takes] += weight
    return weights
