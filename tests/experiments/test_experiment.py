"""Whole experiments on fake engines: the winner, keeping the incumbent, resume in the confirmation, gate, report."""

import asyncio
import dataclasses
from collections.abc import Callable

import pytest

from trimtab.engine.contract import Configuration
from trimtab.engine.fake_server import FakeScript
from trimtab.errors import ExperimentError
from trimtab.experiments.experiment import run_experiment
from trimtab.experiments.fake_host import FakeHost
from trimtab.experiments.gate import check_configuration
from trimtab.experiments.plan import ExperimentPlan, estimate
from trimtab.experiments.progress import ConfirmRunFinished, Event
from trimtab.experiments.result import ExperimentResult

MakePlan = Callable[..., ExperimentPlan]


def ignore(_event: Event) -> None:
    return None


async def test_a_better_configuration_wins_with_an_interval_above_zero(make_plan: MakePlan) -> None:
    plan, host = make_plan(), FakeHost()
    events: list[Event] = []
    result = await run_experiment(plan, host, events.append)
    assert result.winner is not None
    assert result.winner["quantization"] == "int8"
    gain = result.promotion.standings[0].gain
    assert gain is not None
    assert 0 < gain.low <= gain.mean <= gain.high
    runs = [e for e in events if isinstance(e, ConfirmRunFinished)]
    assert len(runs) == 6  # winner, incumbent and default in two rounds
    assert runs[-1].seconds_left == 0
    assert not host.running
    assert ExperimentResult.from_json((plan.folder / "result.json").read_bytes()) == result
    for text in ("## Best against default and incumbent", "2 restarts", "quantization", "engine and client share"):
        assert text in result.report


async def test_equal_configurations_keep_the_incumbent(make_plan: MakePlan) -> None:
    spec = {"objective": {"maximize": "goodput"}}
    result = await run_experiment(make_plan(spec), FakeHost(script=lambda _: FakeScript(ttft_s=0.01)), ignore)
    assert result.winner is None
    assert result.promotion.sentence.startswith("Keep the incumbent")


async def test_goodput_lies_where_the_stairs_break(make_plan: MakePlan) -> None:
    def script(configuration: Configuration) -> FakeScript:
        # 1 slot of 20 ms serves 50 requests/s: the stair at 45/s holds the SLO, 67.5/s builds a queue
        return FakeScript(ttft_s=0.020, tpot_s=0.0, num_slots=1 if configuration["quantization"] == "fp32" else 8)

    spec = {
        "objective": {"maximize": "goodput"},
        "slo": {"ttft": {"p95": "150ms"}, "errorRate": "1%"},
        "search": {
            "space": {"max_num_seqs": {"low": 2, "high": 3}},
            "budget": {"trials": 2},
            "trial": {"warmup": "0s", "duration": "5s"},
            "confirm": {"finalists": 1, "rounds": 2, "duration": "2500ms"},
        },
    }
    result = await run_experiment(make_plan(spec), FakeHost(script=script), ignore)
    scores = {r.origin: r.score for r in result.records}
    assert scores["default"] == pytest.approx(30 * 5.0)
    assert 30 <= (scores["incumbent"] or 0) < 67.5


async def test_an_interrupted_confirmation_goes_on_where_it_was(make_plan: MakePlan) -> None:
    plan, host = make_plan(), FakeHost()
    loop_task: list[asyncio.Task[ExperimentResult]] = []

    def cancel_after_two_runs(event: Event) -> None:
        if isinstance(event, ConfirmRunFinished) and event.run == 2:
            loop_task[0].cancel()

    loop_task.append(asyncio.create_task(run_experiment(plan, host, cancel_after_two_runs)))
    with pytest.raises(asyncio.CancelledError):
        await loop_task[0]
    assert not host.running
    with (plan.folder / "confirm.jsonl").open("a") as lines:
        lines.write('{"round": 1, "outc')  # as a crash would leave it
    events: list[Event] = []
    result = await run_experiment(plan, host, events.append)
    assert [e.run for e in events if isinstance(e, ConfirmRunFinished)] == [3, 4, 5, 6]
    assert len(result.confirmation.runs) == 6
    events.clear()
    await run_experiment(plan, host, events.append)
    assert not any(isinstance(e, ConfirmRunFinished) for e in events)


async def test_a_finalist_that_fails_in_the_confirmation_does_not_win(make_plan: MakePlan) -> None:
    host = FakeHost()
    host_start, confirming = host.start, False

    def watch(event: Event) -> None:
        nonlocal confirming
        confirming = confirming or type(event).__name__ == "ConfirmStarted"

    async def start(configuration: Configuration, *, label: str):  # type: ignore[no-untyped-def]
        host._why_not = lambda c: 6 if confirming and c["quantization"] == "int8" else None
        return await host_start(configuration, label=label)

    host.start = start  # type: ignore[method-assign]
    result = await run_experiment(make_plan(), host, watch)
    assert result.winner is None
    assert "could not be measured" in result.promotion.sentence
    assert "crash, in phase start" in result.report


async def test_the_gate_passes_what_keeps_its_bounds_and_says_why_others_fail(make_plan: MakePlan) -> None:
    plan, host = make_plan(), FakeHost()
    catalogue = plan.adapter.catalogue
    good = await check_configuration(plan, host, catalogue.configuration({"quantization": "int8"}))
    assert good.passed
    assert not good.reasons
    bad = await check_configuration(plan, host, catalogue.configuration({"quantization": "int4"}))
    assert not bad.passed
    assert any(reason.startswith("kl") for reason in bad.reasons)
    slow = dataclasses.replace(plan, policy=plan.policy.model_copy(update={"slo": make_slo("1ms")}))
    assert any("ttft_p95" in r for r in (await check_configuration(slow, host, catalogue.default())).reasons)
    dead = await check_configuration(plan, FakeHost(why_not=lambda _: 3), catalogue.default())
    assert dead.reasons[0].startswith("crash in phase start")
    assert not host.running


def make_slo(ttft_p95: str):  # type: ignore[no-untyped-def]
    from trimtab.policies.manifest import SLO

    return SLO.model_validate({"ttft": {"p95": ttft_p95}, "errorRate": "1%"})


def test_the_estimate_names_trials_minutes_and_devices(make_plan: MakePlan) -> None:
    told = estimate(make_plan())
    assert told.num_trials == 7
    assert told.num_confirm_runs == 6
    assert 0 < told.search_minutes <= 10
    assert told.searched_knobs == ("quantization", "max_num_seqs")


def test_content_dependent_knobs_are_left_out_and_said(make_plan: MakePlan) -> None:
    space = {"quantization": ["bf16"], "speculative_method": ["off", "ngram"]}
    told = estimate(make_plan({"search": {"space": space}}))
    assert told.searched_knobs == ("quantization",)
    assert "content" in told.left_out["speculative_method"]


async def test_cores_are_never_shared_silently(make_plan: MakePlan) -> None:
    with pytest.raises(ExperimentError, match="share: true"):
        await run_experiment(make_plan({"share": False}), FakeHost(), ignore)
