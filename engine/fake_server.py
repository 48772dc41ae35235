"""FakeEngine: a real HTTP server that speaks the engines' protocol with timings that a script decides.

For tests of whatever talks to an engine: load generators, trials, a user's own adapter. It computes nothing; a
completion takes the scripted time to its first token and between tokens, slots are scarce as scripted, and prompt
log-probabilities come from a small known distribution, so that an expected figure can be worked out by hand.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from aiohttp import web

from trimtab.engine.contract import EngineEndpoint, KnobValue

NUM_TOKENS = 64  # the fake vocabulary: token ids 0 to 63, written t0 to t63
_TOP = 20


@dataclass(frozen=True, slots=True)
class FakeScript:
    """How the engine behaves. ``drift`` 0 answers with the reference distribution; more moves away from it."""

    ttft_s: float = 0.01
    tpot_s: float = 0.002
    num_slots: int = 8  # requests served at once; others wait
    max_queue: int = 1000  # waiting requests beyond which one is refused with 429
    fail_every: int | None = None  # every nth completion answers 500; None: none does
    cut_every: int | None = None  # every nth completion's stream ends early; None: none does
    drift: float = 0.0


class FakeEngine:
    """One fake engine on a free loopback port. ``knobs`` is what its admin interface reports and changes."""

    def __init__(self, script: FakeScript, knobs: Mapping[str, KnobValue], *, model: str = "fake") -> None:
        self.script = script
        self.knobs = dict(knobs)
        self.num_completions = 0
        self.num_in_flight = 0
        self._model = model
        self._slots = asyncio.Semaphore(script.num_slots)
        self._runner: web.AppRunner | None = None

    async def start(self) -> EngineEndpoint:
        """Listens and returns where. The admin interface shares the port, which a real engine's never does."""
        app = web.Application(client_max_size=1 << 24)
        app.router.add_get("/ready", self._ready)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_get("/admin/knobs", self._get_knobs)
        app.router.add_patch("/admin/knobs", self._patch_knobs)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        url = f"http://{host}:{port}"
        return EngineEndpoint(url, url, "fake", self._model)

    async def stop(self) -> None:
        """Closes every connection at once, like a crash."""
        if self._runner is not None:
            # asyncio leaks a connection that it accepted in the iteration in which its server closes.
            await asyncio.sleep(0.01)
            await self._runner.cleanup()
            self._runner = None

    async def _ready(self, _request: web.Request) -> web.Response:
        return web.Response(text="ready")

    async def _get_knobs(self, _request: web.Request) -> web.Response:
        return web.json_response({"knobs": self.knobs})

    async def _patch_knobs(self, request: web.Request) -> web.Response:
        self.knobs.update(await request.json())
        return web.json_response({"knobs": self.knobs})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body.get("prompt_logprobs") is not None:
            return web.json_response(self._logprobs(body["prompt"]))
        self.num_completions += 1
        if _is_nth(self.num_completions, self.script.fail_every):
            return web.json_response({"error": {"message": "scripted failure"}}, status=500)
        if self.num_in_flight >= self.script.num_slots + self.script.max_queue:
            headers = {"Retry-After": "1"}
            return web.json_response({"error": {"message": "queue full"}}, status=429, headers=headers)
        cut = _is_nth(self.num_completions, self.script.cut_every)
        self.num_in_flight += 1
        try:
            async with self._slots:
                return await self._stream(request, body, cut)
        finally:
            self.num_in_flight -= 1

    async def _stream(self, request: web.Request, body: Mapping[str, Any], cut: bool) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        num_tokens = int(body["max_tokens"])
        await asyncio.sleep(self.script.ttft_s)
        for i in range(num_tokens):
            if i:
                await asyncio.sleep(self.script.tpot_s)
            await response.write(
                _event({"choices": [{"index": 0, "text": f"t{i % NUM_TOKENS} ", "finish_reason": None}]})
            )
            if cut:
                return response
        await response.write(_event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}))
        num_prompt = len(body["prompt"].split())
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt + num_tokens,
        }
        await response.write(_event({"choices": [], "usage": usage}))
        await response.write(b"data: [DONE]\n\n")
        return response

    def _logprobs(self, prompt: str) -> dict[str, Any]:
        ids = fake_tokens(prompt)
        positions: list[dict[str, Any] | None] = [None]
        actual: list[float | None] = [None]
        for previous, token in itertools.pairwise(ids):
            logs = fake_distribution(previous, self.script.drift)
            order = np.argsort(-logs)
            listed = {*order[:_TOP].tolist(), token}
            positions.append(
                {
                    str(i): {
                        "logprob": float(logs[i]),
                        "rank": int(np.flatnonzero(order == i)[0]) + 1,
                        "decoded_token": f"t{i}",
                    }
                    for i in sorted(listed)
                }
            )
            actual.append(float(logs[token]))
        logprobs = {"tokens": [f"t{i}" for i in ids], "token_logprobs": actual}
        choice = {
            "index": 0,
            "text": prompt,
            "logprobs": logprobs,
            "prompt_logprobs": positions,
            "finish_reason": "length",
        }
        return {"choices": [choice], "usage": {"prompt_tokens": len(ids), "completion_tokens": 0}}


def fake_tokens(text: str) -> list[int]:
    """One token a word, by its length and first letter."""
    return [(len(word) * 7 + ord(word[0])) % NUM_TOKENS for word in text.split()]


def fake_distribution(previous: int, drift: float) -> npt.NDArray[np.float64]:
    """Log-probabilities of the next token after ``previous``; ``drift`` scales a fixed disturbance."""
    generator = np.random.default_rng(previous)
    logits = 3.0 * generator.standard_normal(NUM_TOKENS) + drift * generator.standard_normal(NUM_TOKENS)
    logs: npt.NDArray[np.float64] = logits - np.log(np.exp(logits).sum())
    return logs


def _is_nth(number: int, every: int | None) -> bool:
    return every is not None and number % every == 0


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"
