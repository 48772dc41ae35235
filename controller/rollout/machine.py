"""The rollout as a pure state machine: what should run, where requests should go, and what comes next.

``controller.rollout.reconcile`` makes the world match ``desired`` and feeds what it saw to ``advance``. Nothing here
does I/O or reads a clock: every path can be tested, and a killed controller goes on from the stored state.

    STARTING ──both ready──▶ STEPPING ──last step passed──▶ PROMOTING ──drained──▶ SUCCEEDED
        └─────────────┬──────────┴───────canary lost────────────┘
                      ▼
                 ROLLING_BACK ──drained──▶ ROLLED_BACK
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from trimtab.policies.judge import Decision, Verdict
from trimtab.policies.manifest import Rollout


class Phase(StrEnum):
    """Where a rollout is. Each member's comment says how it is left."""

    STARTING = "starting"  # canary and baseline become ready, or one fails to start
    STEPPING = "stepping"  # the judge decides on the step, or a person does, or time runs out
    PROMOTING = "promoting"  # requests on the old stable have ended; the canary becomes stable in the same write
    ROLLING_BACK = "rolling_back"  # requests on the canary have ended
    SUCCEEDED = "succeeded"  # never
    ROLLED_BACK = "rolled_back"  # never


FINAL = frozenset({Phase.SUCCEEDED, Phase.ROLLED_BACK})


class Arm(StrEnum):
    STABLE = "stable"
    CANARY = "canary"
    BASELINE = "baseline"


class ArmState(StrEnum):
    """What the reconciler last saw of an arm."""

    STARTING = "starting"
    READY = "ready"
    LOST = "lost"  # crashed, did not start in time, or stopped answering


class RolloutCommand(StrEnum):
    PROMOTE = "promote"  # leave the present step without the judge
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class RolloutState:
    """What is stored. Times are Unix seconds; ``entered_unix_s`` is when the phase or its step began."""

    phase: Phase
    step: int
    paused: bool
    command: RolloutCommand | None
    entered_unix_s: float
    started_unix_s: float


@dataclass(frozen=True, slots=True)
class Desired:
    """Which arms run, and each arm's share of requests in percent (they add up to 100)."""

    weights: dict[Arm, int]

    @property
    def arms(self) -> frozenset[Arm]:
        return frozenset(self.weights)


@dataclass(frozen=True, slots=True)
class Observation:
    """What the reconciler saw after making the world match ``desired``.

    ``drained`` says that no arm of weight 0 has a request in flight; ``lost_reason`` is told to people.
    """

    canary: ArmState
    baseline: ArmState
    lost_reason: str
    drained: bool
    verdict: Verdict | None
    now_unix_s: float


@dataclass(frozen=True, slots=True)
class Transition:
    """The next state and why, in a sentence."""

    state: RolloutState
    kind: str
    sentence: str


def begin(now_unix_s: float) -> RolloutState:
    return RolloutState(Phase.STARTING, 0, False, None, now_unix_s, now_unix_s)


def is_judged(rollout: Rollout, state: RolloutState) -> bool:
    """Whether ``state`` is at a step of ``rollout``; a policy that changed under it may have fewer."""
    return state.phase is Phase.STEPPING and rollout.steps[min(state.step, len(rollout.steps) - 1)].weight < 100


def desired(rollout: Rollout, state: RolloutState) -> Desired:
    """What the world should look like in ``state``."""
    match state.phase:
        case Phase.STEPPING if is_judged(rollout, state):
            weight = rollout.steps[state.step].weight
            return Desired({Arm.STABLE: 100 - 2 * weight, Arm.CANARY: weight, Arm.BASELINE: weight})
        case Phase.PROMOTING:
            return Desired({Arm.STABLE: 0, Arm.CANARY: 100, Arm.BASELINE: 0})
        case Phase.SUCCEEDED | Phase.ROLLED_BACK:
            return Desired({Arm.STABLE: 100})
        case _:
            return Desired({Arm.STABLE: 100, Arm.CANARY: 0, Arm.BASELINE: 0})


def advance(rollout: Rollout, state: RolloutState, seen: Observation) -> Transition | None:
    """The transition that ``seen`` calls for; ``None`` while there is nothing to decide."""
    if state.phase in FINAL:
        return None
    if state.phase is Phase.ROLLING_BACK:
        return _enter(state, Phase.ROLLED_BACK, seen, "rolled_back", "Rolled back.") if seen.drained else None
    if state.command is RolloutCommand.ABORT:
        return _enter(state, Phase.ROLLING_BACK, seen, "abort", "Roll back: a person aborted.")
    if seen.canary is ArmState.LOST:
        return _enter(state, Phase.ROLLING_BACK, seen, "canary_lost", f"Roll back: {seen.lost_reason}.")
    if state.phase is Phase.STEPPING and not is_judged(rollout, state):
        sentence = f"Roll back: the policy in force has no step {state.step + 1} to compare at."
        return _enter(state, Phase.ROLLING_BACK, seen, "step_gone", sentence)
    match state.phase:
        case Phase.STARTING:
            return _leave_starting(rollout, state, seen)
        case Phase.STEPPING:
            return _leave_step(rollout, state, seen)
        case _:
            sentence = "Promoted: the canary is stable, and the old stable has drained."
            return _enter(state, Phase.SUCCEEDED, seen, "promoted", sentence) if seen.drained else None


def _leave_starting(rollout: Rollout, state: RolloutState, seen: Observation) -> Transition | None:
    if seen.baseline is ArmState.LOST:
        return _enter(state, Phase.ROLLING_BACK, seen, "baseline_lost", f"Roll back: {seen.lost_reason}.")
    if seen.canary is ArmState.READY and seen.baseline is ArmState.READY:
        return _enter_step(rollout, state, seen, 0, "Canary and baseline are ready")
    return None


def _leave_step(rollout: Rollout, state: RolloutState, seen: Observation) -> Transition | None:
    if state.command is RolloutCommand.PROMOTE:
        return _enter_step(rollout, state, seen, state.step + 1, "A person promoted")
    if seen.baseline is ArmState.LOST:
        again = replace(state, entered_unix_s=seen.now_unix_s)
        return Transition(again, "step_again", f"The step begins again: {seen.lost_reason}.")
    verdict = seen.verdict
    if verdict is not None and verdict.decision is Decision.ROLLBACK:
        return _enter(state, Phase.ROLLING_BACK, seen, "rollback", verdict.sentence)
    if state.paused:
        return None
    if verdict is not None and verdict.decision is Decision.PROMOTE:
        return _enter_step(rollout, state, seen, state.step + 1, verdict.sentence.removesuffix("."))
    judge = rollout.judge
    if seen.now_unix_s - state.started_unix_s <= judge.maxDuration:
        return None
    undecided = f"no decision within {judge.maxDuration:g} s"
    if judge.onInconclusive == "pause":
        return Transition(replace(state, paused=True), "pause", f"Paused: {undecided}.")
    return _enter(state, Phase.ROLLING_BACK, seen, "inconclusive", f"Roll back: {undecided}.")


def _enter_step(rollout: Rollout, state: RolloutState, seen: Observation, step: int, why: str) -> Transition:
    """Enters ``step``, or the promotion when it is the last, whose weight is 100."""
    if rollout.steps[step].weight == 100:
        return _enter(replace(state, step=step), Phase.PROMOTING, seen, "promote", f"{why}; all requests go to it.")
    sentence = f"{why}; step {step + 1}: {rollout.steps[step].weight} % of requests."
    return _enter(replace(state, step=step), Phase.STEPPING, seen, "step", sentence)


def _enter(state: RolloutState, phase: Phase, seen: Observation, kind: str, sentence: str) -> Transition:
    entered = replace(state, phase=phase, command=None, entered_unix_s=seen.now_unix_s)
    if phase is not Phase.STEPPING:
        entered = replace(entered, paused=False)
    return Transition(entered, kind, sentence)
