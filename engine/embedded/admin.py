"""The admin port: knobs, draining, records. Every call carries the bearer token; users never reach this port.

``engine.adapters.embedded`` is its client.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from trimtab.engine.adapters.embedded import CATALOGUE
from trimtab.engine.contract import ChangeCost, Configuration, KnobValue
from trimtab.engine.embedded.http_edge import (
    handle_http_error,
    handle_trimtab_error,
    handle_unexpected_error,
    read_json,
    shows_token,
    unauthorized,
)
from trimtab.engine.embedded.service import Service
from trimtab.errors import EngineError, KnobError, RequestError, TrimtabError

# A step of the largest prefill takes a second or two. The adapter gives up after 10 s: by then it must have heard
# that nothing was changed.
_CHANGE_TIMEOUT_S = 8.0


def admin_app(service: Service, token: str) -> Starlette:
    """The ASGI application of the admin port."""
    endpoints = _Endpoints(service)
    return Starlette(
        routes=[
            Route("/admin/knobs", endpoints.read_knobs, methods=["GET"]),
            Route("/admin/knobs", endpoints.change_knobs, methods=["PATCH"]),
            Route("/admin/drain", endpoints.read_drain, methods=["GET"]),
            Route("/admin/drain", endpoints.start_drain, methods=["POST"]),
            Route("/admin/drain", endpoints.stop_drain, methods=["DELETE"]),
            Route("/admin/records", endpoints.records, methods=["GET"]),
        ],
        middleware=[Middleware(_TokenGuard, token=token)],
        exception_handlers={
            TrimtabError: handle_trimtab_error,
            HTTPException: handle_http_error,
            Exception: handle_unexpected_error,
        },
    )


class _TokenGuard:
    """Answers 401 to whoever does not show the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not shows_token(scope, self._token):
            answer = unauthorized("the admin port needs the header Authorization: Bearer TOKEN")
            await answer(scope, receive, send)
            return
        await self._app(scope, receive, send)


class _Endpoints:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._changing = asyncio.Lock()

    async def read_knobs(self, _request: Request) -> Response:
        return JSONResponse(self._knobs_body(self._service.engine.configuration))

    async def change_knobs(self, request: Request) -> Response:
        """Takes ``{knob: value}``; answers when the change is in force."""
        values = await read_json(request)
        async with self._changing:
            wanted = self._wanted(values)
            change = asyncio.wrap_future(self._service.engine.change(wanted))
            try:
                in_force = await asyncio.wait_for(change, _CHANGE_TIMEOUT_S)
            except TimeoutError as error:
                raise EngineError(f"the engine reached no step boundary within {_CHANGE_TIMEOUT_S:g} s") from error
            self._service.publish_info()
        return JSONResponse(self._knobs_body(in_force))

    async def read_drain(self, _request: Request) -> Response:
        return self._drain_response()

    async def start_drain(self, _request: Request) -> Response:
        self._service.gate.drained_by_admin = True
        return self._drain_response()

    async def stop_drain(self, _request: Request) -> Response:
        self._service.gate.drained_by_admin = False
        return self._drain_response()

    async def records(self, request: Request) -> Response:
        text = request.query_params.get("since", "0")
        if not (text.isascii() and text.isdigit() and len(text) <= 18):
            raise RequestError(
                f"since: {text[:50]!r} is not a cursor; accepted: a whole number from 0", param="since"
            )
        page = self._service.telemetry.records.since(int(text))
        return JSONResponse(
            {
                "records": [asdict(r) for r in page.records],
                "next_cursor": page.next_cursor,
                "num_dropped": page.num_dropped,
            }
        )

    def _wanted(self, values: Any) -> Configuration:
        live = [k.name for k in CATALOGUE.knobs if k.change_cost is ChangeCost.LIVE]
        if not isinstance(values, dict) or not values:
            raise RequestError(f"the body is not an object of knobs; live knobs: {', '.join(live)}")
        for name in values:
            if name not in live:
                raise RequestError(
                    f"{name[:100]!r} is not a live knob; accepted: {', '.join(live)}", param=name[:100]
                )
        knobs: dict[str, KnobValue] = values
        try:
            return CATALOGUE.configuration(knobs, base=self._service.engine.configuration)
        except KnobError as error:
            raise RequestError(str(error)) from error

    def _knobs_body(self, configuration: Configuration) -> dict[str, Any]:
        injection = self._service.injection
        return {
            "knobs": dict(configuration),
            "configuration": configuration.id,
            "inject": None if injection is None else injection.label,
        }

    def _drain_response(self) -> Response:
        gate = self._service.gate
        return JSONResponse({"draining": gate.draining, "num_in_flight": gate.num_in_flight})
