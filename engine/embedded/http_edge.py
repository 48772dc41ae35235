"""What every HTTP request meets first: a request id, a body limit, a count of those in flight, one error shape.

Both servers use the error bodies; the traffic server is wrapped in ``TrafficEdge``.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import secrets
from typing import Any

import structlog
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trimtab.engine.embedded.service import Gate
from trimtab.errors import OverloadedError, RequestError, TrimtabError

MAX_BODY_BYTES = 4 * 1024 * 1024

# A refused body is read on and thrown away up to here, so that a client that is still sending gets to see the answer.
_MAX_DISCARDED_BYTES = 64 * 1024 * 1024

# A body that trickles in counts as in flight, and so would hold a drain open for as long as its client likes.
BODY_TIMEOUT_S = 30.0

_OPEN_PATHS = ("/health", "/ready")

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

_log = structlog.get_logger(__name__)


class BodyError(RequestError):
    """The request's body cannot be taken in; ``status`` is its HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class TrafficEdge:
    """ASGI middleware: sets ``request_id`` in the request's state, counts requests in flight until they are sent.

    With an ``api_key`` it lets only those in who show it; health checks are open to all.
    """

    def __init__(self, app: ASGIApp, gate: Gate, api_key: str | None) -> None:
        self._app = app
        self._gate = gate
        self._api_key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        if self._api_key is not None and scope["path"] not in _OPEN_PATHS and not shows_token(scope, self._api_key):
            await unauthorized("this engine needs the header Authorization: Bearer KEY")(scope, receive, send_with_id)
            return
        counted = scope["method"] == "POST"
        self._gate.num_in_flight += counted
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._gate.num_in_flight -= counted


def shows_token(scope: Scope, token: str) -> bool:
    """Whether the request carries the bearer token, compared in constant time."""
    shown = [value for name, value in scope["headers"] if name == b"authorization"]
    return len(shown) == 1 and hmac.compare_digest(shown[0], f"Bearer {token}".encode())


def unauthorized(message: str) -> JSONResponse:
    """The answer to a request without the token."""
    body = {"error": {"message": message, "type": "authentication_error", "param": None, "code": "invalid_api_key"}}
    return JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})


async def read_json(request: Request) -> Any:
    """The request's body. Raises ``RequestError`` when it is late, too large, not JSON, or not writable as UTF-8."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            content = await _read(request)
    except TimeoutError as error:
        raise BodyError(f"the body did not arrive within {BODY_TIMEOUT_S:g} s", 408) from error
    try:
        body = json.loads(content, parse_constant=_refuse_constant)
        # Half a surrogate pair passes as JSON, and then no tokenizer and no answer can carry it.
        json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    return body


async def _read(request: Request) -> bytes:
    chunks: list[bytes] = []
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes <= MAX_BODY_BYTES:
            chunks.append(chunk)
        else:
            chunks.clear()
        if num_bytes > _MAX_DISCARDED_BYTES:
            break
    if num_bytes > MAX_BODY_BYTES:
        raise BodyError(f"the body has more than {MAX_BODY_BYTES} bytes; shorten the prompt", 413)
    return b"".join(chunks)


def error_response(error: TrimtabError) -> JSONResponse:
    """The error in OpenAI's shape, with its status and, where it helps, Retry-After."""
    headers = {"Retry-After": str(error.retry_after_s)} if isinstance(error, OverloadedError) else {}
    return JSONResponse(error_body(error), _status_and_type(error)[0], headers)


def error_body(error: TrimtabError) -> dict[str, Any]:
    """OpenAI's error object."""
    param = error.param if isinstance(error, RequestError) else None
    code = error.code if isinstance(error, RequestError) else "engine_error"
    return {"error": {"message": str(error), "type": _status_and_type(error)[1], "param": param, "code": code}}


def _status_and_type(error: TrimtabError) -> tuple[int, str]:
    """The HTTP status and OpenAI's type of error."""
    match error:
        case OverloadedError(draining=True):
            return 503, "service_unavailable"
        case OverloadedError():
            return 429, "rate_limit_error"
        case BodyError():
            return error.status, "invalid_request_error"
        case RequestError(code="model_not_found"):
            return 404, "invalid_request_error"
        case RequestError():
            return 400, "invalid_request_error"
        case _:
            return 500, "server_error"


async def handle_trimtab_error(request: Request, error: Exception) -> JSONResponse:
    """Starlette's handler for ``TrimtabError``."""
    assert isinstance(error, TrimtabError)
    if not isinstance(error, RequestError):
        _log.error("request_failed", path=request.url.path, error=str(error))
    return error_response(error)


async def handle_http_error(request: Request, error: Exception) -> JSONResponse:
    """Starlette's handler for its own 404 and 405."""
    status = getattr(error, "status_code", 500)
    message = f"{request.method} {request.url.path}: {getattr(error, 'detail', error)}"
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}
    return JSONResponse(body, status, getattr(error, "headers", None))


async def handle_unexpected_error(request: Request, error: Exception) -> JSONResponse:
    """Starlette's handler for a bug of ours: logged with its trace, answered without it."""
    _log.error("handler_raised", path=request.url.path, error=f"{type(error).__name__}: {error}", exc_info=error)
    body = {"error": {"message": "internal error", "type": "server_error", "param": None, "code": None}}
    return JSONResponse(body, 500)


def _request_id(scope: Scope) -> str:
    """The client's own id when it is a plain one, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = value.decode("latin-1")
            if _REQUEST_ID.fullmatch(text):
                return str(text)
    return secrets.token_hex(16)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
