"""The embedded engine's client: whatever an engine answers, the caller gets the answer or an ``EngineCallError``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from trimtab.engine.adapters.embedded import EmbeddedAdapter
from trimtab.engine.adapters.interface import EngineClient
from trimtab.engine.contract import EngineEndpoint
from trimtab.errors import EngineCallError

CALLS: dict[str, Callable[[EngineClient], Awaitable[Any]]] = {
    "knobs": lambda client: client.set_live_knobs({"max_num_seqs": 2}),
    "drain": lambda client: client.drain_state(),
    "records": lambda client: client.records_since(0),
}


@pytest.mark.parametrize("call", list(CALLS))
@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"{}",
        b'{"knobs": {"max_num_seqs": 0}, "records": [{"outcome": "lost"}]}',
        b'{"knobs": {"a knob of another version": 1}, "records": [{"outcome": "failed", "sequence": 1}]}',
    ],
)
async def test_an_answer_that_cannot_be_read_is_a_failed_call(call: str, answer: bytes) -> None:
    async def respond(_request: web.Request) -> web.Response:
        return web.Response(body=answer, content_type="application/json", charset="utf-8")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", respond)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = "http://{}:{}".format(*runner.addresses[0][:2])
    try:
        async with aiohttp.ClientSession() as http:
            client = EmbeddedAdapter().client(http, EngineEndpoint(url, url, "token", "m"))
            with pytest.raises(EngineCallError, match=url):
                await CALLS[call](client)
    finally:
        await runner.cleanup()
