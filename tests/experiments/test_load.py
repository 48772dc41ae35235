"""The open-loop generator against a real server with known timings."""

import asyncio
import os

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from trimtab.engine.fake_server import FakeEngine, FakeScript
from trimtab.experiments.load.client_process import LoadClient
from trimtab.experiments.load.figures import is_oversaturated, load_figures
from trimtab.experiments.load.generator import LoadGenerator
from trimtab.experiments.load.result import LoadJob, LoadResult, Outcome, RequestResult
from trimtab.experiments.workload.interface import PlannedRequest


def plan(num: int, gap_s: float, output_tokens: int = 4) -> tuple[PlannedRequest, ...]:
    return tuple(PlannedRequest(i, i * gap_s, "some words here", output_tokens) for i in range(num))


def job(url: str, requests: tuple[PlannedRequest, ...], *, duration_s: float = 0.3, drain_s: float = 5.0) -> LoadJob:
    return LoadJob(url, "fake", requests, len(requests) / duration_s, duration_s, drain_s)


async def run(script: FakeScript, requests: tuple[PlannedRequest, ...], **arguments: float) -> LoadResult:
    engine = FakeEngine(script, {})
    endpoint = await engine.start()
    try:
        return await LoadGenerator(job(endpoint.base_url, requests, **arguments)).run()
    finally:
        await engine.stop()


async def test_times_are_those_of_the_server() -> None:
    load = await run(FakeScript(ttft_s=0.05, tpot_s=0.02), plan(6, 0.03))
    figures = load_figures(load)
    assert figures.num_succeeded == figures.num_sent == 6
    assert figures.ttft_s is not None
    assert figures.tpot_s is not None
    assert 0.05 <= figures.ttft_s.p50 < 0.09
    assert 0.02 <= figures.tpot_s.p50 < 0.035
    assert figures.itl_s is not None
    assert figures.itl_s.num_values == 6 * 3
    assert all(r.prompt_tokens == 3 and r.output_tokens == 4 for r in load.results)


async def test_waiting_for_a_slot_counts_from_the_intended_arrival() -> None:
    load = await run(FakeScript(ttft_s=0.1, tpot_s=0.0, num_slots=1), plan(4, 0.0, 1))
    assert max(r.ttft_s or 0 for r in load.results) >= 0.4


async def test_a_slow_server_does_not_slow_the_arrivals() -> None:
    load = await run(FakeScript(ttft_s=0.5, num_slots=1), plan(5, 0.02, 1))
    assert all(r.sent_s - r.intended_s < 0.1 for r in load.results)
    assert load.lag_s < 0.1


async def test_every_request_has_one_outcome_and_failures_say_their_kind() -> None:
    load = await run(FakeScript(fail_every=3, cut_every=5, max_queue=0, num_slots=20), plan(30, 0.002))
    kinds = [r.kind for r in load.results]
    assert [r.index for r in load.results] == list(range(30))
    assert kinds.count("http_500") == 10
    assert kinds.count("cut") == 4
    assert kinds.count(None) + kinds.count("http_500") + kinds.count("cut") + kinds.count("http_429") == 30


async def test_a_503_that_does_not_say_when_to_come_back_is_a_failure() -> None:
    """So a proxy answers for a replica that it has lost."""

    async def lost(_request: web.Request) -> web.Response:
        return web.Response(status=503, text="upstream connect error")

    app = web.Application()
    app.router.add_post("/v1/completions", lost)
    async with TestServer(app) as server:
        load = await LoadGenerator(job(str(server.make_url("")).rstrip("/"), plan(3, 0.0, 1))).run()
    assert [(r.outcome, r.kind) for r in load.results] == [(Outcome.FAILED, "http_503")] * 3


async def test_a_full_queue_is_refused_not_failed() -> None:
    load = await run(FakeScript(ttft_s=0.2, max_queue=1, num_slots=1), plan(6, 0.0, 1))
    assert [r.outcome for r in load.results].count(Outcome.REFUSED) == 4
    assert load_figures(load).error_ratio == pytest.approx(4 / 6)


async def test_what_is_unanswered_at_the_deadline_failed() -> None:
    load = await run(FakeScript(ttft_s=30.0), plan(3, 0.0), duration_s=0.05, drain_s=0.1)
    assert [r.kind for r in load.results] == ["deadline"] * 3


async def test_a_dead_server_is_a_failed_connection() -> None:
    load = await LoadGenerator(job("http://127.0.0.1:9", plan(2, 0.0))).run()
    assert [r.kind for r in load.results] == ["connect"] * 2


async def test_a_server_that_dies_midway_disconnects() -> None:
    engine = FakeEngine(FakeScript(ttft_s=0.0, tpot_s=5.0), {})
    endpoint = await engine.start()
    running = asyncio.create_task(LoadGenerator(job(endpoint.base_url, plan(2, 0.0))).run())
    while engine.num_in_flight < 2:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    await engine.stop()
    assert {r.outcome for r in (await running).results} == {Outcome.FAILED}


async def test_stop_ends_arrivals_and_finishes_what_is_in_flight() -> None:
    engine = FakeEngine(FakeScript(ttft_s=0.2), {})
    endpoint = await engine.start()
    generator = LoadGenerator(job(endpoint.base_url, plan(100, 0.05), duration_s=5.0))
    running = asyncio.create_task(generator.run())
    while engine.num_in_flight < 2:
        await asyncio.sleep(0.01)
    generator.stop()
    load = await running
    await engine.stop()
    assert 2 <= len(load.results) < 20
    assert {r.outcome for r in load.results} == {Outcome.SUCCEEDED}


async def test_a_wrong_answer_length_is_a_failure() -> None:
    class Short(FakeEngine):
        async def _stream(self, request, body, cut):  # type: ignore[no-untyped-def]
            return await super()._stream(request, {**body, "max_tokens": 2}, cut)

    engine = Short(FakeScript(), {})
    endpoint = await engine.start()
    load = await LoadGenerator(job(endpoint.base_url, plan(1, 0.0))).run()
    await engine.stop()
    assert load.results[0].kind == "length"


async def test_the_client_process_runs_pinned_and_leaves_nothing() -> None:
    engine = FakeEngine(FakeScript(), {})
    endpoint = await engine.start()
    cpu = min(os.sched_getaffinity(0))
    async with LoadClient((cpu,)) as client:
        first = await client.run(job(endpoint.base_url, plan(5, 0.01)))
        assert client._process is not None
        pid = client._process.pid
        assert os.sched_getaffinity(pid) == {cpu}
        second = await client.run(job(endpoint.base_url, plan(3, 0.01)))
        assert client._process.pid == pid
    await engine.stop()
    assert len(first.results) == 5
    assert len(second.results) == 3
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_cancelled_load_closes_its_connections() -> None:
    engine = FakeEngine(FakeScript(ttft_s=60.0), {})
    endpoint = await engine.start()
    async with LoadClient(()) as client:
        running = asyncio.create_task(client.run(job(endpoint.base_url, plan(3, 0.0))))
        while engine.num_in_flight < 3:
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        while engine.num_in_flight:
            await asyncio.sleep(0.01)
    await engine.stop()


def queueing(rise_s: float, num: int = 40) -> LoadResult:
    """Arrivals each 0.1 s whose TTFT rises by ``rise_s`` a request."""
    results = tuple(
        RequestResult(
            i, i / 10, i / 10, i / 10 + 0.2 + rise_s * i, i / 10 + 0.3 + rise_s * i, 1, 2, (), Outcome.SUCCEEDED, None
        )
        for i in range(num)
    )
    return LoadResult(10.0, 4.0, 5.0, 0.0, results)


def test_rising_concurrency_and_ttft_is_oversaturation() -> None:
    assert is_oversaturated(queueing(0.05))


def test_steady_latency_is_not_oversaturation() -> None:
    assert not is_oversaturated(queueing(0.0))


def test_refused_requests_do_not_count_as_in_flight() -> None:
    served = [
        RequestResult(2 * i, i, i, i + 0.01 * i, i + 0.01 * i, 3, 1, (), Outcome.SUCCEEDED, None) for i in range(30)
    ]
    refused = [RequestResult(2 * i + 1, i, i, None, None, 0, 0, (), Outcome.REFUSED, "http_429") for i in range(30)]
    assert not is_oversaturated(LoadResult(2.0, 30.0, 31.0, 0.0, (*served, *refused)))


def test_a_handful_of_requests_shows_no_slope() -> None:
    assert not is_oversaturated(queueing(0.05, num=5))


@pytest.mark.parametrize("event", ['{"usage": {}}', '{"choices": null}', '{"choices": ["text"]}', '{"usage": 1}'])
async def test_an_event_of_another_shape_fails_its_request_at_once(event: str) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=f"data: {event}\n\ndata: [DONE]\n\n", content_type="text/event-stream")

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    told: list[RequestResult] = []
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        generator = LoadGenerator(job(url, plan(1, 0.0), duration_s=0.05), on_result=told.append)
        await generator.run()
    finally:
        await runner.cleanup()
    assert [(r.outcome, r.kind) for r in told] == [(Outcome.FAILED, "stream")]
