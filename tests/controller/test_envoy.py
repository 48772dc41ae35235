"""Real Envoy: weights change without a restart, a dropped connection or a cut stream."""

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from trimtab.controller.traffic.envoy import EnvoySplit
from trimtab.controller.traffic.envoy_config import clusters
from trimtab.controller.traffic.interface import Route
from trimtab.engine.process import ProcessRecord, ProcessSpec, spawn, terminate
from trimtab.errors import TrafficError


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@asynccontextmanager
async def upstream(name: str) -> AsyncIterator[int]:
    """A server that answers its name, and streams it slowly under /stream."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=name)

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(20):
            await response.write(f"data: {name}\n\n".encode())
            await asyncio.sleep(0.1)
        return response

    app = web.Application()
    app.router.add_get("/", answer)
    app.router.add_get("/stream", stream)
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield port
    finally:
        await runner.cleanup()


def start(split: EnvoySplit, port: int, folder: Path) -> ProcessRecord:
    return spawn(ProcessSpec(split.command(port), {}, (), folder / "envoy.log"), lambda _: None)


async def until_ready(split: EnvoySplit) -> None:
    for _ in range(200):
        if await split.is_ready():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("Envoy did not become ready")


async def test_weights_move_under_load_and_nothing_is_lost(tmp_path: Path) -> None:
    split = EnvoySplit(tmp_path)
    port = free_port()
    async with upstream("stable") as a, upstream("canary") as b, aiohttp.ClientSession() as http:
        process = start(split, port, tmp_path)
        try:
            await until_ready(split)

            async def routes(stable: int, canary: int) -> None:
                await split.apply([Route("s", "127.0.0.1", a, stable), Route("c", "127.0.0.1", b, canary)])

            async def ask(num: int) -> Counter[str]:
                seen: Counter[str] = Counter()
                for _ in range(num):
                    async with http.get(f"http://127.0.0.1:{port}/") as response:
                        seen[await response.text() if response.status == 200 else str(response.status)] += 1
                return seen

            async def whole_stream() -> int:
                async with http.get(f"http://127.0.0.1:{port}/stream") as response:
                    return (await response.text()).count("data:")

            await routes(100, 0)
            assert await ask(50) == {"stable": 50}
            streams = [asyncio.create_task(whole_stream()) for _ in range(4)]
            await asyncio.sleep(0.1)
            background = asyncio.create_task(ask(600))
            await routes(50, 50)
            half = await ask(400)
            assert set(half) == {"stable", "canary"}
            # Binomial(400, 1/2) lies within five standard deviations.
            assert abs(half["canary"] - 200) < 50
            await routes(0, 100)
            assert await ask(50) == {"canary": 50}
            assert set(await background) <= {"stable", "canary"}
            assert await asyncio.gather(*streams) == [20] * 4
            await routes(0, 100)  # the same weights again are confirmed too
        finally:
            terminate(process, grace_s=5)


async def test_a_restarted_envoy_serves_the_last_weights(tmp_path: Path) -> None:
    split = EnvoySplit(tmp_path)
    port = free_port()
    async with upstream("only") as a, aiohttp.ClientSession() as http:
        for attempt in range(2):
            process = start(split, port, tmp_path)
            try:
                await until_ready(split)
                if attempt == 0:
                    await split.apply([Route("s", "127.0.0.1", a, 100)])
                async with http.get(f"http://127.0.0.1:{port}/") as response:
                    assert await response.text() == "only"
            finally:
                terminate(process, grace_s=0)


async def test_what_envoy_does_not_confirm_is_an_error(tmp_path: Path) -> None:
    split = EnvoySplit(tmp_path)
    with pytest.raises(TrafficError, match="add up to 100"):
        await split.apply([Route("s", "127.0.0.1", 1, 90)])
    with pytest.raises(TrafficError, match="admin socket"):
        await split.apply([Route("s", "127.0.0.1", 1, 100)])


def test_envoy_refuses_no_burst_before_the_engine_does() -> None:
    cluster = clusters([Route("s", "127.0.0.1", 1, 100)])["resources"][0]
    limits = cluster["circuit_breakers"]["thresholds"][0]
    # Each is 1,024 where it is not given.
    assert min(limits[name] for name in ("max_connections", "max_pending_requests", "max_requests")) > 1024


def test_a_socket_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrafficError, match="too long"):
        EnvoySplit(tmp_path / ("x" * 100))
