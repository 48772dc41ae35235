"""The traffic port: OpenAI's endpoints, health and metrics. The admin port is ``admin``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from trimtab.engine.embedded.generation import Emission
from trimtab.engine.embedded.http_edge import (
    TrafficEdge,
    error_body,
    handle_http_error,
    handle_trimtab_error,
    handle_unexpected_error,
    read_json,
)
from trimtab.engine.embedded.openai_protocol import (
    ChatQuery,
    CompletionQuery,
    Options,
    parse_chat,
    parse_completion,
    parse_prefill,
)
from trimtab.engine.embedded.openai_responses import (
    ChatWriter,
    CompletionWriter,
    Header,
    PrefillWriter,
    Prompt,
    TokenCounts,
    Writer,
)
from trimtab.engine.embedded.service import Arrival, ClientGoneError, Output, Service
from trimtab.errors import EngineError, RequestError, TrimtabError

# nginx's code for a client that closed the connection; nobody sees it.
_CLIENT_CLOSED_REQUEST = 499

# Texts longer than this are tokenized off the event loop: about 1 ms.
_SHORT_TEXT_CHARS = 4000


def traffic_app(service: Service, api_key: str | None) -> Starlette:
    """The ASGI application of the traffic port. ``api_key`` ``None``: anyone who reaches the port may use it."""
    endpoints = _Endpoints(service)
    return Starlette(
        routes=[
            Route("/v1/completions", endpoints.completions, methods=["POST"]),
            Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
            Route("/v1/prefill", endpoints.prefill, methods=["POST"]),
            Route("/v1/models", endpoints.models),
            Route("/v1/models/{name:path}", endpoints.model),
            Route("/health", endpoints.health),
            Route("/ready", endpoints.ready),
            Route("/metrics", endpoints.metrics),
        ],
        middleware=[Middleware(TrafficEdge, gate=service.gate, api_key=api_key)],
        exception_handlers={
            TrimtabError: handle_trimtab_error,
            HTTPException: handle_http_error,
            Exception: handle_unexpected_error,
        },
    )


class EventStream(Response):
    """Server-sent events: one chunk an emission, OpenAI's ``[DONE]`` at the end."""

    media_type = "text/event-stream"

    def __init__(self, output: Output, writer: Writer, options: Options) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._output = output
        self._writer = writer
        self._options = options

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._output.watch(receive)
            emissions = self._output.emissions()
            # A request may be refused while it waits: the status is not sent before the first emission is there.
            first = await anext(emissions)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._send_events(send, first, emissions)
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})
        except (ClientGoneError, OSError):
            return
        finally:
            self._output.close()

    async def _send_events(
        self, send: Send, first: tuple[int, Emission], rest: AsyncIterator[tuple[int, Emission]]
    ) -> None:
        counts = TokenCounts()
        await self._send_emission(send, counts, first)
        try:
            async for item in rest:
                await self._send_emission(send, counts, item)
        except (EngineError, RequestError) as error:
            await _send_event(send, error_body(error))
            return
        if self._options.include_usage:
            await _send_event(send, self._writer.usage_chunk(counts))

    async def _send_emission(self, send: Send, counts: TokenCounts, item: tuple[int, Emission]) -> None:
        index, emission = item
        counts.add(index, emission)
        chunk = self._writer.chunk(index, emission)
        if self._options.continuous_usage:
            chunk["usage"] = self._writer.usage_chunk(counts)["usage"]
        await _send_event(send, chunk)


class _Endpoints:
    """One method an endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def completions(self, request: Request) -> Response:
        arrival = Arrival.now(request.state.request_id)
        query = parse_completion(await _read(request))
        self._check_model(query.options)
        prompts = await self._completion_prompts(query)
        header = Header(arrival.request_id, self._service.model.name)
        writer = CompletionWriter(header, self._service.model.tokenizer, prompts, query.options)
        return await self._respond(request, query.options, arrival, (prompts, writer))

    async def chat(self, request: Request) -> Response:
        arrival = Arrival.now(request.state.request_id)
        query = parse_chat(await _read(request))
        self._check_model(query.options)
        prompt = Prompt(await asyncio.to_thread(self._render, query), "")
        header = Header(arrival.request_id, self._service.model.name)
        writer = ChatWriter(header, self._service.model.tokenizer, prompt)
        return await self._respond(request, query.options, arrival, ([prompt], writer))

    async def prefill(self, request: Request) -> Response:
        """Computes a prompt and nothing more, so that a later one that begins alike finds it in the prefix cache."""
        arrival = Arrival.now(request.state.request_id)
        query = parse_prefill(await _read(request))
        self._check_model(query.options)
        if isinstance(query, ChatQuery):
            prompts = [Prompt(await asyncio.to_thread(self._render, query), "")]
        else:
            prompts = await self._completion_prompts(query)
        writer = PrefillWriter(Header(arrival.request_id, self._service.model.name), prompts)
        return await self._respond(request, query.options, arrival, (prompts, writer))

    async def models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        self._check_name(request.path_params["name"])
        return JSONResponse(self._model_card())

    async def health(self, _request: Request) -> Response:
        """Whether the process works at all; draining is healthy."""
        fatal = self._service.engine.fatal
        if fatal is not None:
            return JSONResponse({"status": "failed", "reason": fatal}, 503)
        return JSONResponse({"status": "ok"})

    async def ready(self, _request: Request) -> Response:
        """Whether it takes requests now."""
        fatal = self._service.engine.fatal
        if fatal is not None or self._service.gate.draining:
            return JSONResponse({"status": "not ready", "reason": fatal or "draining"}, 503)
        return JSONResponse({"status": "ready"})

    async def metrics(self, _request: Request) -> Response:
        return Response(self._service.telemetry.metrics.render(), media_type="text/plain; version=0.0.4")

    async def _respond(
        self, request: Request, options: Options, arrival: Arrival, work: tuple[Sequence[Prompt], Writer]
    ) -> Response:
        prompts, writer = work
        fitting = self._service.num_fitting_tokens
        jobs = [
            (p.token_ids, options.sampling(fitting(len(p.token_ids), options.max_output_tokens))) for p in prompts
        ]
        output = self._service.open(jobs, arrival, options.queueing)
        if options.stream:
            return EventStream(output, writer, options)
        try:
            output.watch(request.receive)
            outputs: list[list[Emission]] = [[] for _ in prompts]
            async for index, emission in output.emissions():
                outputs[index].append(emission)
        except ClientGoneError:
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
        finally:
            output.close()
        # Prompt log-probabilities make bodies of megabytes: they are written off the event loop.
        body = await asyncio.to_thread(lambda: json.dumps(writer.whole(outputs), allow_nan=False).encode())
        return Response(body, media_type="application/json")

    async def _completion_prompts(self, query: CompletionQuery) -> list[Prompt]:
        if all(isinstance(p, str) and len(p) <= _SHORT_TEXT_CHARS for p in query.prompts):
            return self._encode(query)
        return await asyncio.to_thread(self._encode, query)

    def _encode(self, query: CompletionQuery) -> list[Prompt]:
        tokenizer = self._service.model.tokenizer
        prompts = []
        for prompt in query.prompts:
            if isinstance(prompt, str):
                token_ids, text = tuple(tokenizer.encode(prompt, parse_special=True)), prompt
            else:
                bad = [i for i in prompt if not 0 <= i < tokenizer.vocab_size]
                if bad:
                    raise RequestError(
                        f"prompt: token id {bad[0]} is unknown; accepted: 0 to {tokenizer.vocab_size - 1}",
                        param="prompt",
                    )
                token_ids, text = prompt, tokenizer.decode(prompt) if query.options.echo else ""
            if not token_ids:
                raise RequestError("prompt is empty; give at least one token", param="prompt")
            prompts.append(Prompt(token_ids, text))
        return prompts

    def _render(self, query: ChatQuery) -> tuple[int, ...]:
        tokenizer = self._service.model.tokenizer
        text = tokenizer.render_chat(list(query.messages))
        return tuple(tokenizer.encode(text, parse_special=True))

    def _check_model(self, options: Options) -> None:
        self._check_name(options.model)

    def _check_name(self, name: str) -> None:
        served = self._service.model.name
        if name != served:
            raise RequestError(
                f"the model {name[:100]!r} does not exist; accepted: {served!r}",
                param="model",
                code="model_not_found",
            )

    def _model_card(self) -> dict[str, Any]:
        model = self._service.model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created_unix_s,
            "owned_by": "trimtab",
            "max_model_len": self._service.context_tokens,
        }


async def _read(request: Request) -> Any:
    try:
        return await read_json(request)
    except ClientDisconnect as error:
        raise RequestError("the client closed the connection") from error


async def _send_event(send: Send, body: dict[str, Any]) -> None:
    data = f"data: {json.dumps(body, separators=(',', ':'), allow_nan=False)}\n\n".encode()
    await send({"type": "http.response.body", "body": data, "more_body": True})
