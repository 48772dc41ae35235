"""The HTTP API (``/api/v1``) and the one live page, over the running controller. Loopback only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, HTTPException, Query, Request
from fastapi import Path as PathParameter
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from fastapi.templating import Jinja2Templates
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import select
from starlette.exceptions import HTTPException as RoutingError

from trimtab.controller.console import views
from trimtab.controller.console.access import Access, AccessMiddleware
from trimtab.controller.loop import ControlLoop
from trimtab.controller.store.tables import DecisionRow, ExperimentRow
from trimtab.errors import TrimtabError

EVENT_PERIOD_S = 1.0
KEEP_ALIVE_S = 15.0
MAX_ID = 2**63 - 1  # SQLite's largest integer
_HERE = Path(__file__).parent
Id = Annotated[int, PathParameter(ge=1, le=MAX_ID)]


class NewRollout(BaseModel):
    """A person's request: knobs on top of the stable configuration, and a labelled fault or ``None``."""

    model_config = ConfigDict(extra="forbid")

    knobs: dict[str, str | int | float]
    # Becomes an argument of the engine's command line, which judges it; a NUL would keep it from ever starting.
    inject: Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,100}$")] | None = None


class NewGate(BaseModel):
    """The configuration to check: knobs on top of the stable configuration."""

    model_config = ConfigDict(extra="forbid")

    knobs: dict[str, str | int | float]


def create_app(loop: ControlLoop, access: Access) -> FastAPI:
    """The application; ``loop`` does the work, ``access`` guards the door."""
    app = FastAPI(title="Trimtab", docs_url=None, redoc_url=None, openapi_url="/api/v1/openapi.json")
    app.add_middleware(AccessMiddleware, access=access)
    app.mount("/static", StaticFiles(directory=_HERE / "static"), name="static")
    _add_errors(app)
    _add_page(app, loop, access)
    _add_experiments(app, loop)
    _add_rollouts(app, loop)
    return app


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(TrimtabError)
    async def refused(_: Request, error: TrimtabError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, status_code=409)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        told = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        return JSONResponse({"error": told}, status_code=422)

    @app.exception_handler(RoutingError)  # the router's own errors and FastAPI's HTTPException
    async def http_error(_: Request, error: RoutingError) -> JSONResponse:
        return JSONResponse({"error": error.detail}, status_code=error.status_code, headers=error.headers)


def _add_page(app: FastAPI, loop: ControlLoop, access: Access) -> None:
    templates = Jinja2Templates(directory=_HERE / "templates")

    @app.get("/", response_class=HTMLResponse)
    async def page(request: Request) -> HTMLResponse:
        return templates.TemplateResponse(request, "overview.html", {"state": _state(loop)})

    @app.get("/api/v1/state")
    async def state() -> dict[str, Any]:
        return _state(loop)

    @app.post("/api/v1/links")
    async def link() -> dict[str, str]:
        return {"token": access.new_link_token()}

    @app.get("/api/v1/events")
    async def events(request: Request) -> StreamingResponse:
        return StreamingResponse(_events(request, loop), media_type="text/event-stream")

    @app.get("/api/v1/decisions")
    async def decisions(after: Annotated[int, Query(ge=0, le=MAX_ID)] = 0) -> list[dict[str, Any]]:
        with loop.store.read() as session:
            rows = select(DecisionRow).where(DecisionRow.sequence > after).order_by(DecisionRow.sequence).limit(500)
            return [views.decision_view(d) for d in session.scalars(rows)]


def _state(loop: ControlLoop) -> dict[str, Any]:
    return views.state_view(loop.store, loop.status())


async def _events(request: Request, loop: ControlLoop) -> AsyncIterator[str]:
    """The state whenever it changes, as server-sent events; a comment now and then keeps the connection."""
    last, quiet_s = "", 0.0
    while not await request.is_disconnected():
        state = _state(loop)
        clock = state.pop("now_unix_s")
        text = json.dumps(state)
        if text != last:
            last, quiet_s = text, 0.0
            yield f"event: state\ndata: {json.dumps({**state, 'now_unix_s': clock})}\n\n"
        elif quiet_s >= KEEP_ALIVE_S:
            quiet_s = 0.0
            yield ": still here\n\n"
        await asyncio.sleep(EVENT_PERIOD_S)
        quiet_s += EVENT_PERIOD_S


def _add_experiments(app: FastAPI, loop: ControlLoop) -> None:
    @app.get("/api/v1/experiments")
    async def experiments() -> list[dict[str, Any]]:
        with loop.store.read() as session:
            rows = session.scalars(select(ExperimentRow).order_by(ExperimentRow.id))
            return [views.experiment_view(e, full=False) for e in rows]

    @app.get("/api/v1/experiments/{experiment_id}")
    async def experiment(experiment_id: Id) -> dict[str, Any]:
        with loop.store.read() as session:
            row = session.get(ExperimentRow, experiment_id)
        if row is None:
            raise HTTPException(404, f"no experiment {experiment_id}")
        return views.experiment_view(row, full=True)

    @app.post("/api/v1/experiments", status_code=202)
    async def start_experiment() -> dict[str, int]:
        return {"id": loop.start_experiment("manual")}

    @app.post("/api/v1/gates", status_code=202)
    async def start_gate(body: NewGate) -> dict[str, str]:
        configuration = loop.configuration(body.knobs)
        loop.start_gate(configuration)
        return {"configuration_id": configuration.id}

    @app.get("/api/v1/gates/{configuration_id}")
    async def gate(configuration_id: str) -> dict[str, Any]:
        row = loop.tuner.gate(configuration_id)
        if (row is None or not row.passed) and loop.tuner.is_busy():
            return {"state": "running"}  # a check that failed before is being repeated
        if row is None:
            return {"state": "unknown"}
        return {"state": "passed" if row.passed else "failed", "detail": row.detail}


def _add_rollouts(app: FastAPI, loop: ControlLoop) -> None:
    @app.get("/api/v1/rollouts")
    async def rollouts() -> list[dict[str, Any]]:
        return [views.rollout_view(loop.store, r) for r in loop.rollouts.all()]

    @app.get("/api/v1/rollouts/{rollout_id}")
    async def rollout(rollout_id: Id) -> dict[str, Any]:
        return views.rollout_view(loop.store, loop.rollouts.get(rollout_id))

    @app.post("/api/v1/rollouts", status_code=202)
    async def start_rollout(body: NewRollout) -> dict[str, int]:
        return {"id": loop.start_rollout(loop.configuration(body.knobs), "a person", inject=body.inject)}

    @app.post("/api/v1/rollouts/{rollout_id}/{verb}")
    async def command(rollout_id: Id, verb: Literal["pause", "resume", "promote", "abort"]) -> dict[str, Any]:
        loop.rollouts.command(rollout_id, verb)
        return views.rollout_view(loop.store, loop.rollouts.get(rollout_id))
