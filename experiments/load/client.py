"""One streamed completion over HTTP, timed. The generator calls it; it knows OpenAI's wire format, no engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from trimtab.experiments.load.result import Outcome, RequestResult
from trimtab.experiments.workload.interface import PlannedRequest

_REFUSED_STATUSES = (429, 503)
MAX_EVENT_BYTES = 4 * 1024 * 1024


@dataclass(slots=True)
class Progress:
    """How far one request has come; the only mutable state of a request. ``clock`` counts from the load's start."""

    request: PlannedRequest
    clock: Callable[[], float]
    sent_s: float = 0.0
    first_token_s: float | None = None
    last_token_s: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    itls_s: list[float] = field(default_factory=list)
    has_usage: bool = False

    def saw_token(self) -> None:
        now_s = self.clock()
        if self.last_token_s is None:
            self.first_token_s = now_s
        else:
            self.itls_s.append(now_s - self.last_token_s)
        self.last_token_s = now_s

    def result(self, outcome: Outcome, kind: str | None) -> RequestResult:
        return RequestResult(
            index=self.request.index,
            intended_s=self.request.at_s,
            sent_s=self.sent_s,
            first_token_s=self.first_token_s,
            last_token_s=self.last_token_s,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            itls_s=tuple(self.itls_s),
            outcome=outcome,
            kind=kind,
        )


def request_body(model: str, request: PlannedRequest, cache_salt: str) -> bytes:
    """A greedy streamed completion whose output length is pinned.

    It shares cached prefixes only with requests of the same ``cache_salt``: a load must not find what an earlier one
    of the same prompts left behind.
    """
    body = {
        "model": model,
        "prompt": request.prompt,
        "cache_salt": cache_salt,
        "max_tokens": request.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body).encode()


async def complete(http: aiohttp.ClientSession, base_url: str, body: bytes, progress: Progress) -> RequestResult:
    """Sends one request and reads its stream to the end. Server and network faults become results, not errors."""
    headers = {"Content-Type": "application/json"}
    progress.sent_s = progress.clock()
    try:
        async with http.post(f"{base_url}/v1/completions", data=body, headers=headers) as response:
            if response.status != 200:
                await response.read()
                # A proxy answers 503 too when it has lost a replica; only who says when to come back has refused.
                refused = response.status in _REFUSED_STATUSES and "Retry-After" in response.headers
                return progress.result(Outcome.REFUSED if refused else Outcome.FAILED, f"http_{response.status}")
            fault = await _read_stream(response, progress)
    except aiohttp.ClientConnectorError:
        return progress.result(Outcome.FAILED, "connect")
    except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError, ConnectionError):
        return progress.result(Outcome.FAILED, "disconnect")
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError, AttributeError):
        # The last four: a server may send any JSON, and what is not shaped as OpenAI's is nonsense in the stream.
        return progress.result(Outcome.FAILED, "stream")
    return progress.result(Outcome.FAILED if fault else Outcome.SUCCEEDED, fault)


async def _read_stream(response: aiohttp.ClientResponse, progress: Progress) -> str | None:
    """Returns the kind of fault, or ``None``."""
    async for event in _events(response):
        if event == b"[DONE]":
            return _fault_of_complete(progress)
        chunk = json.loads(event)
        if not isinstance(chunk, dict) or "error" in chunk:
            return "stream"
        _read_chunk(chunk, progress)
    return "cut"


def _read_chunk(chunk: dict[str, Any], progress: Progress) -> None:
    usage = chunk.get("usage")
    if usage is not None:
        progress.has_usage = True
        progress.prompt_tokens = int(usage["prompt_tokens"])
        progress.output_tokens = int(usage["completion_tokens"])
    for choice in chunk.get("choices", ()):
        # A token may carry no text yet (half a character); the closing chunk carries no token.
        if choice.get("text") or choice.get("finish_reason") is None:
            progress.saw_token()


def _fault_of_complete(progress: Progress) -> str | None:
    if not progress.has_usage:
        return "usage"
    if progress.output_tokens != progress.request.output_tokens or progress.first_token_s is None:
        return "length"
    return None


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The data of server-sent events, one line each, as OpenAI sends them."""
    held = b""
    async for piece in response.content.iter_any():
        held += piece
        if len(held) > MAX_EVENT_BYTES:
            raise ValueError(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        *lines, held = held.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
