"""The rollout machine: every path ends in one stable configuration, and harm always wins over progress."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.controller.rollout.machine import (
    FINAL,
    Arm,
    ArmState,
    Observation,
    Phase,
    RolloutCommand,
    RolloutState,
    advance,
    begin,
    desired,
    is_judged,
)
from trimtab.policies.judge import Decision, Verdict
from trimtab.policies.manifest import Rollout

ROLLOUT = Rollout.model_validate(
    {
        "steps": [{"weight": 10, "detect": "50%"}, {"weight": 50, "detect": "20%"}, {"weight": 100}],
        "judge": {"maxDuration": "100s"},
    }
)
PAUSING = ROLLOUT.model_copy(update={"judge": ROLLOUT.judge.model_copy(update={"onInconclusive": "pause"})})


def verdict(decision: Decision) -> Verdict:
    return Verdict(decision, f"{decision}: as asked.", (), 10, 10, 5)


def seen(**changes: object) -> Observation:
    ready = Observation(ArmState.READY, ArmState.READY, "the arm is lost", False, None, 10.0)
    return replace(ready, **changes)  # type: ignore[arg-type]


def stepping(step: int = 0, **changes: object) -> RolloutState:
    return replace(begin(0.0), phase=Phase.STEPPING, step=step, **changes)  # type: ignore[arg-type]


def test_the_straight_way_to_success() -> None:
    state = begin(0.0)
    phases = [state.phase]
    for observation in (
        seen(canary=ArmState.STARTING),
        seen(),
        seen(verdict=verdict(Decision.PROMOTE)),
        seen(verdict=verdict(Decision.PROMOTE)),
        seen(drained=False),
        seen(drained=True),
    ):
        transition = advance(ROLLOUT, state, observation)
        state = transition.state if transition else state
        phases.append(state.phase)
    assert phases == ["starting", "starting", "stepping", "stepping", "promoting", "promoting", "succeeded"]
    assert state.step == 2


def test_a_step_splits_equally_between_canary_and_baseline() -> None:
    assert desired(ROLLOUT, stepping(0)).weights == {Arm.STABLE: 80, Arm.CANARY: 10, Arm.BASELINE: 10}
    assert desired(ROLLOUT, stepping(1)).weights == {Arm.STABLE: 0, Arm.CANARY: 50, Arm.BASELINE: 50}


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.STEPPING, Phase.PROMOTING])
@pytest.mark.parametrize("paused", [True, False])
def test_a_lost_canary_rolls_back_at_once(phase: Phase, paused: bool) -> None:
    state = replace(begin(0.0), phase=phase, paused=paused)
    transition = advance(ROLLOUT, state, seen(canary=ArmState.LOST, verdict=verdict(Decision.PROMOTE)))
    assert transition is not None
    assert transition.state.phase is Phase.ROLLING_BACK
    assert "the arm is lost" in transition.sentence


def test_a_pause_holds_the_weight_but_not_a_rollback() -> None:
    paused = stepping(paused=True)
    assert advance(ROLLOUT, paused, seen(verdict=verdict(Decision.PROMOTE), now_unix_s=1e6)) is None
    transition = advance(ROLLOUT, paused, seen(verdict=verdict(Decision.ROLLBACK)))
    assert transition is not None
    assert transition.state.phase is Phase.ROLLING_BACK


@pytest.mark.parametrize("decision", [None, Decision.CONTINUE, Decision.INCONCLUSIVE])
def test_an_open_question_holds_the_weight_until_time_is_out(decision: Decision | None) -> None:
    given_verdict = verdict(decision) if decision else None
    assert advance(ROLLOUT, stepping(), seen(verdict=given_verdict, now_unix_s=100.0)) is None
    late = seen(verdict=given_verdict, now_unix_s=100.1)
    rolled_back = advance(ROLLOUT, stepping(), late)
    assert rolled_back is not None
    assert rolled_back.state.phase is Phase.ROLLING_BACK
    paused = advance(PAUSING, stepping(), late)
    assert paused is not None
    assert paused.state == stepping(paused=True)


def test_a_lost_baseline_begins_the_step_again() -> None:
    transition = advance(ROLLOUT, stepping(1), seen(baseline=ArmState.LOST, verdict=verdict(Decision.PROMOTE)))
    assert transition is not None
    assert transition.state == stepping(1, entered_unix_s=10.0)


def test_commands() -> None:
    promoted = advance(ROLLOUT, stepping(0, command=RolloutCommand.PROMOTE, paused=True), seen())
    assert promoted is not None
    assert (promoted.state.step, promoted.state.command) == (1, None)
    aborted = advance(ROLLOUT, stepping(0, command=RolloutCommand.ABORT), seen(verdict=verdict(Decision.PROMOTE)))
    assert aborted is not None
    assert aborted.state.phase is Phase.ROLLING_BACK


observations = st.builds(
    Observation,
    canary=st.sampled_from(ArmState),
    baseline=st.sampled_from(ArmState),
    lost_reason=st.just("lost"),
    drained=st.booleans(),
    verdict=st.none() | st.sampled_from(Decision).map(verdict),
    now_unix_s=st.floats(0, 200),
)


@settings(deadline=None)
@given(st.lists(st.tuples(observations, st.none() | st.sampled_from(RolloutCommand)), max_size=40), st.booleans())
def test_every_path_keeps_the_promises(events: list[tuple[Observation, RolloutCommand | None]], pauses: bool) -> None:
    rollout = PAUSING if pauses else ROLLOUT
    state = begin(0.0)
    was_rolling_back = False
    for observation, command in events:
        state = replace(state, command=command or state.command)
        transition = advance(rollout, state, observation)
        if transition is None:
            continue
        assert transition.sentence.endswith(".")
        assert state.phase not in FINAL
        if was_rolling_back:
            assert transition.state.phase is Phase.ROLLED_BACK
        if transition.state.phase is Phase.SUCCEEDED:
            assert state.phase is Phase.PROMOTING
            assert observation.canary is not ArmState.LOST
        state = transition.state
        was_rolling_back |= state.phase is Phase.ROLLING_BACK
        weights = desired(rollout, state).weights
        assert sum(weights.values()) == 100
        assert min(weights.values()) >= 0
        assert weights[Arm.STABLE] == 100 or state.phase in (Phase.STEPPING, Phase.PROMOTING)


@settings(deadline=None)
@given(st.lists(observations, max_size=20))
def test_every_rollout_can_be_ended(events: list[Observation]) -> None:
    state = begin(0.0)
    for observation in events:
        transition = advance(ROLLOUT, state, observation)
        state = transition.state if transition else state
    state = replace(state, command=RolloutCommand.ABORT) if state.phase not in FINAL else state
    for _ in range(2):
        transition = advance(ROLLOUT, state, seen(drained=True))
        state = transition.state if transition else state
    assert state.phase in FINAL


@pytest.mark.parametrize("weights", [[50, 100], [10, 100], [10, 20, 50, 100]])
@given(step=st.integers(0, 5), phase=st.sampled_from(list(Phase)))
def test_a_policy_that_lost_the_step_gives_the_canary_nothing_and_rolls_back(
    weights: list[int], step: int, phase: Phase
) -> None:
    changed = Rollout.model_validate({"steps": [{"weight": w, "detect": "50%"} for w in weights]})
    state = replace(begin(0.0), phase=phase, step=step)
    shares = desired(changed, state).weights
    assert sum(shares.values()) == 100
    assert min(shares.values()) >= 0
    if phase is Phase.STEPPING and step >= len(weights) - 1:
        assert not is_judged(changed, state)
        assert shares[Arm.CANARY] == 0
        transition = advance(changed, state, seen(verdict=verdict(Decision.PROMOTE)))
        assert transition is not None
        assert transition.state.phase is Phase.ROLLING_BACK
        assert f"no step {step + 1}" in transition.sentence
