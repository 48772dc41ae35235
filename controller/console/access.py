"""Who may talk to the console: loopback names only, same-origin writes only, and a token.

The command line sends the controller's token as a bearer. A browser opens a one-time link, which trades its token for
a cookie. The Host and Origin allow-lists stop a web page that resolves its own name to 127.0.0.1 (DNS rebinding).
"""

from __future__ import annotations

import hmac
import secrets
from collections import deque

from fastapi import Request
from fastapi.responses import JSONResponse, RedirectResponse, Response
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.types import ASGIApp

MAX_LINKS = 32  # unused ones; every `trimtab status` makes one, and a new one ends the oldest
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_HEADERS = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; form-action 'self'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


class Access:
    """The secrets of one controller process: the bearer, one-time link tokens and browser sessions."""

    def __init__(self, bearer: str, port: int) -> None:
        self._bearer = bearer
        self._links: deque[str] = deque(maxlen=MAX_LINKS)
        self._sessions: set[str] = set()
        # Cookies know no ports: the name keeps the sessions of two controllers on one machine apart.
        self.cookie = f"trimtab_session_{port}"
        self.hosts = frozenset({f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}"})

    def new_link_token(self) -> str:
        """A token that opens the page once."""
        token = secrets.token_urlsafe(24)
        self._links.append(token)
        return token

    def redeem(self, token: str) -> str | None:
        """Trades a link's token for a session; ``None`` when it is unknown or used."""
        if token not in self._links:
            return None
        self._links.remove(token)
        session = secrets.token_urlsafe(32)
        self._sessions.add(session)
        return session

    def knows(self, request: Request) -> bool:
        """Whether the request carries the bearer or a session's cookie."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(token.encode(), self._bearer.encode()):
            return True
        return request.cookies.get(self.cookie, "") in self._sessions


class AccessMiddleware(BaseHTTPMiddleware):
    """Refuses what ``Access`` does not know, before any handler runs."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        super().__init__(app)
        self._access = access

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        response = self._refusal(request)
        if response is None and request.url.path == "/" and "token" in request.query_params:
            response = self._open_session(request.query_params["token"])
        if response is None:
            response = self._stranger(request) or await call_next(request)
        for name, value in _HEADERS.items():
            response.headers[name] = value
        return response

    def _refusal(self, request: Request) -> Response | None:
        """What a page of another site is told; ``None`` when host and origin are ours."""
        host = request.headers.get("host", "")
        if host not in self._access.hosts:
            return _refuse(421, f"host {host!r} is not served; accepted: {', '.join(sorted(self._access.hosts))}")
        origin = request.headers.get("origin")
        if origin is not None and origin.removeprefix("http://") not in self._access.hosts:
            return _refuse(403, f"origin {origin!r} is not allowed")
        return None

    def _stranger(self, request: Request) -> Response | None:
        """What a caller without a token is told, or a browser's write without its origin; ``None`` when known."""
        if not self._access.knows(request):
            return _refuse(401, "no valid token; run `trimtab status` for a fresh link to this page")
        has_cookie = request.cookies.get(self._access.cookie) is not None
        if request.method not in _SAFE and has_cookie and request.headers.get("origin") is None:
            return _refuse(403, "a browser's write needs its Origin")
        return None

    def _open_session(self, token: str) -> Response:
        session = self._access.redeem(token)
        if session is None:
            return _refuse(401, "this link was used already; run `trimtab status` for a fresh one")
        response = RedirectResponse("/", status_code=303)
        response.set_cookie(self._access.cookie, session, httponly=True, samesite="strict", path="/")
        return response


def _refuse(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status_code=status)
