"""What every request meets first, without a server: bodies that do not come."""

from __future__ import annotations

import asyncio

import pytest
from starlette.requests import Request
from starlette.types import Message

from trimtab.engine.embedded import http_edge
from trimtab.engine.embedded.http_edge import error_response, read_json
from trimtab.errors import RequestError


async def test_a_body_that_trickles_in_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_edge, "BODY_TIMEOUT_S", 0.05)
    parts = iter([{"type": "http.request", "body": b'{"model": ', "more_body": True}])

    async def receive() -> Message:
        part = next(parts, None)
        if part is None:
            await asyncio.Event().wait()
        assert part is not None
        return part

    with pytest.raises(RequestError, match="did not arrive within") as caught:
        await asyncio.wait_for(read_json(Request({"type": "http", "headers": []}, receive)), 5)
    assert error_response(caught.value).status_code == 408
