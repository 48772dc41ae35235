"""The search end to end on fake engines: order, reuse, failures, budgets, Ctrl-C and resume."""

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from trimtab.engine.contract import Configuration
from trimtab.engine.fake_server import FakeScript
from trimtab.errors import ExperimentError
from trimtab.experiments.fake_host import FakeHost, script_of
from trimtab.experiments.load.client_process import LoadClient
from trimtab.experiments.plan import ExperimentPlan
from trimtab.experiments.progress import Event, SearchEnded, SearchStarted, TrialFinished
from trimtab.experiments.search import search
from trimtab.experiments.study import Study, TrialRecord
from trimtab.experiments.trial import FailureKind, TrialRunner

MakePlan = Callable[..., ExperimentPlan]
INT4_OR_SLOW = {"quantization": ["bf16", "int8", "int4"], "max_num_seqs": {"low": 4, "high": 64, "log": True}}


async def run(plan: ExperimentPlan, host: FakeHost, events: list[Event] | None = None) -> list[TrialRecord]:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(LoadClient(()))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        runner = TrialRunner(plan, host, client, http)
        stack.push_async_callback(runner.close)
        with Study(plan) as study:
            return await search(plan, runner, study, (events if events is not None else []).append)


async def test_the_incumbent_and_the_default_come_first_and_the_best_is_found(make_plan: MakePlan) -> None:
    host, events = FakeHost(), list[Event]()
    records = await run(make_plan(), host, events)
    assert [r.origin for r in records[:2]] == ["incumbent", "default"]
    measured = [r for r in records if r.counts]
    assert len(measured) == 7
    feasible = [r for r in measured if r.score is not None and all(v <= 0 for v in r.outcome.constraints.values())]
    best = min(feasible, key=lambda r: r.score or 0)
    assert best.outcome.configuration["quantization"] == "int8"
    assert not host.running
    assert isinstance(events[0], SearchStarted)
    assert isinstance(events[-1], SearchEnded)
    assert sum(isinstance(e, TrialFinished) for e in events) == 7


async def test_live_knobs_are_changed_without_a_start(make_plan: MakePlan) -> None:
    host = FakeHost()
    records = await run(make_plan(), host)
    measured = [r for r in records if r.counts]
    assert len(host.starts) < len(measured)
    assert any(not r.outcome.fresh_engine for r in measured)
    assert any(r.origin == "live" for r in measured)


async def test_weights_that_break_the_floor_are_infeasible_and_measured_once(make_plan: MakePlan) -> None:
    spec = {
        "search": {
            "space": {"quantization": ["int4"], "max_num_seqs": {"low": 4, "high": 64}},
            "budget": {"trials": 5},
            "trial": {"warmup": "0s", "duration": "200ms"},
        }
    }
    records = await run(make_plan(spec), FakeHost())
    int4 = [r for r in records if r.outcome.configuration["quantization"] == "int4"]
    assert int4[0].outcome.constraints["kl"] > 0
    assert {r.outcome.failure.kind for r in int4[1:] if r.outcome.failure} <= {FailureKind.QUALITY}
    assert sum(r.outcome.figures is not None and r.duplicate_of is None for r in int4) == 1


async def test_the_sampler_leaves_weights_that_break_the_floor(make_plan: MakePlan) -> None:
    """The fastest weights are useless here; a sampler that did not learn it would propose nothing else."""
    host = FakeHost(
        script=lambda c: dataclasses.replace(script_of(c), ttft_s=0.2 if c["quantization"] != "int4" else 0.001)
    )
    records = await run(make_plan({"search": _search(8) | {"space": INT4_OR_SLOW}}), host)
    assert sum(r.counts for r in records) == 8
    refused = [r for r in records if r.outcome.failure and r.outcome.failure.kind is FailureKind.QUALITY]
    assert len(refused) < 20
    assert all(r.outcome.constraints["kl"] > 0 for r in refused)


async def test_a_start_that_crashes_or_runs_out_of_memory_is_recorded_and_the_study_goes_on(
    make_plan: MakePlan,
) -> None:
    def why_not(configuration: Configuration) -> int | None:
        return {"int8": 6, "int4": 5}.get(str(configuration["quantization"]))

    records = await run(make_plan(), FakeHost(why_not=why_not))
    kinds = {r.outcome.configuration["quantization"]: r.outcome.failure.kind for r in records if r.outcome.failure}
    assert set(kinds.values()) <= {FailureKind.CRASH, FailureKind.OUT_OF_MEMORY}
    assert kinds
    assert sum(r.counts for r in records) == 7
    for quantization, kind in kinds.items():
        assert kind is (FailureKind.CRASH if quantization == "int8" else FailureKind.OUT_OF_MEMORY)


async def test_an_engine_that_dies_under_load_is_a_crash(make_plan: MakePlan) -> None:
    host = FakeHost()
    original = host.start

    async def start(configuration: Configuration, *, label: str):  # type: ignore[no-untyped-def]
        engine = await original(configuration, label=label)
        if configuration["quantization"] == "bf16":

            async def die() -> None:
                await asyncio.sleep(0.4)
                host.exit_codes[engine.id] = -signal.SIGSEGV
                await host.stop(engine)

            host.dying = asyncio.create_task(die())  # type: ignore[attr-defined]
        return engine

    host.start = start  # type: ignore[method-assign]
    records = await run(make_plan({"search": {**_search(4), "trial": {"warmup": "0s", "duration": "1s"}}}), host)
    bf16 = [r for r in records if r.outcome.configuration["quantization"] == "bf16"]
    assert bf16[0].outcome.failure is not None
    assert bf16[0].outcome.failure.kind is FailureKind.CRASH
    assert sum(r.counts for r in records) == 4


def _search(trials: int) -> dict[str, object]:
    space = {"quantization": ["bf16", "int8"], "max_num_seqs": {"low": 4, "high": 64, "log": True}}
    return {"space": space, "budget": {"trials": trials}, "trial": {"warmup": "0s", "duration": "200ms"}}


async def test_what_cannot_fit_is_refused_before_a_start(make_plan: MakePlan) -> None:
    plan = make_plan()
    host = FakeHost()
    small = dataclasses.replace(plan, devices=dataclasses.replace(plan.devices, memory_bytes=300 * 2**20))
    records = await run(small, host)
    assert not host.starts
    assert {r.outcome.failure.kind for r in records if r.outcome.failure} == {FailureKind.MEMORY}


async def test_a_lagging_client_makes_a_trial_invalid(make_plan: MakePlan) -> None:
    plan = make_plan({"search": _search(2)})
    strict = dataclasses.replace(plan, limits=dataclasses.replace(plan.limits, max_client_lag_s=0.0))
    records = await run(strict, FakeHost())
    assert {r.outcome.failure.kind for r in records if r.outcome.failure} == {FailureKind.CLIENT_LAG}
    assert all(r.score is None for r in records)


async def test_a_cancelled_search_resumes_with_the_same_trial_and_repeats_nothing(make_plan: MakePlan) -> None:
    host = FakeHost(script=lambda c: FakeScript(ttft_s=0.2) if c["quantization"] == "bf16" else script_of(c))
    plan = make_plan({"search": _search(4)})
    started = asyncio.Event()
    host_start = host.start

    async def start(configuration: Configuration, *, label: str):  # type: ignore[no-untyped-def]
        engine = await host_start(configuration, label=label)
        if configuration["quantization"] == "bf16":
            started.set()
        return engine

    host.start = start  # type: ignore[method-assign]
    first = asyncio.create_task(run(plan, host))
    await started.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not host.running
    events: list[Event] = []
    records = await run(plan, host, events)
    assert isinstance(events[0], SearchStarted)
    assert events[0].num_resumed == 2  # the incumbent, and the default as interrupted
    counted = [r for r in records if r.counts]
    assert [r.origin for r in counted[:2]] == ["incumbent", "default"]
    assert len(counted) == 4
    assert len({r.outcome.configuration for r in counted}) == 4


async def test_a_finished_search_measures_nothing_more_and_a_larger_budget_goes_on(make_plan: MakePlan) -> None:
    host = FakeHost()
    await run(make_plan({"search": _search(3)}), host)
    num_starts = len(host.starts)
    assert len([r for r in await run(make_plan({"search": _search(3)}), host) if r.counts]) == 3
    assert len(host.starts) == num_starts
    assert len([r for r in await run(make_plan({"search": _search(5)}), host) if r.counts]) == 5


async def test_another_plan_in_the_same_folder_is_refused(make_plan: MakePlan) -> None:
    with Study(make_plan()):
        pass
    other = make_plan({"slo": {"ttft": {"p95": "3s"}}})
    with pytest.raises(ExperimentError, match="folder of its own"), Study(other):
        pass


async def test_two_processes_cannot_run_one_study(make_plan: MakePlan) -> None:
    with Study(make_plan()), pytest.raises(ExperimentError, match="another process"), Study(make_plan()):
        pass


async def test_trials_that_a_killed_process_left_running_are_failed_and_queued_again(make_plan: MakePlan) -> None:
    plan = make_plan({"search": _search(3)})
    with Study(plan) as study:
        study.seed([("incumbent", plan.incumbent)])
        asked = study.ask()  # and the process dies: nothing is told
    with Study(plan) as study:
        assert study.recover() == 1
        again = study.ask()
        assert again.configuration == asked.configuration
        assert again.origin == "incumbent"
        failed = study.records()[0]
        assert failed.outcome.failure is not None
        assert failed.outcome.failure.kind is FailureKind.INTERRUPTED


async def test_a_seed_that_a_killed_process_had_not_queued_yet_is_queued_by_the_next(make_plan: MakePlan) -> None:
    plan = make_plan()
    seeds = [("incumbent", plan.incumbent), ("default", plan.adapter.catalogue.default())]
    with Study(plan) as study:
        study.seed(seeds[:1])
    with Study(plan) as study:
        study.seed(seeds)
        assert [study.ask().origin for _ in range(3)] == ["incumbent", "default", "sampler"]


async def test_the_time_budget_counts_across_runs(make_plan: MakePlan) -> None:
    spec = {"search": {**_search(50), "budget": {"trials": 50, "duration": "2s"}}}
    records = await run(make_plan(spec), FakeHost())
    num = sum(r.counts for r in records)
    assert 2 <= num < 50
    again = await run(make_plan(spec), FakeHost())
    assert sum(r.counts for r in again) == num


def test_the_control_plane_of_experiments_imports_no_torch(tmp_path: Path) -> None:
    code = "import sys, trimtab.experiments.search, trimtab.experiments.quality; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], env=os.environ, check=False).returncode == 0
