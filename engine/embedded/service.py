"""Between HTTP and the engine's thread: who may come in, and how a request's output gets out.

The traffic server and the admin server share one ``Service``. Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab import __version__
from trimtab.engine.contract import RequestOutcome
from trimtab.engine.embedded.core import RETRY_AFTER_S, Telemetry
from trimtab.engine.embedded.engine_thread import EngineThread
from trimtab.engine.embedded.generation import Emission, GenerationRequest, Queueing
from trimtab.engine.embedded.inject import Injection
from trimtab.engine.embedded.records import Ending, Timeline
from trimtab.engine.embedded.sampling import SamplingParams
from trimtab.engine.embedded.tokenizer import Tokenizer
from trimtab.errors import EngineError, OverloadedError, RequestError, TrimtabError


class ClientGoneError(TrimtabError):
    """The client closed its connection; there is nobody to answer."""


@dataclass(slots=True)
class Gate:
    """Whether requests may come in, and how many HTTP requests are being answered."""

    drained_by_admin: bool = False
    terminating: bool = False
    num_in_flight: int = 0

    @property
    def draining(self) -> bool:
        return self.drained_by_admin or self.terminating

    def check(self) -> None:
        """Raises ``OverloadedError`` while draining."""
        if self.draining:
            why = "is shutting down" if self.terminating else "is draining"
            raise OverloadedError(f"the engine {why}; try another", retry_after_s=RETRY_AFTER_S, draining=True)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What is served. ``digest`` is the SHA-256 of its file; ``max_context_tokens`` is the model's own limit."""

    name: str
    digest: str
    max_context_tokens: int
    tokenizer: Tokenizer
    created_unix_s: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """When and as what a request reached the HTTP handler."""

    request_id: str
    monotonic_s: float
    unix_s: float

    @classmethod
    def now(cls, request_id: str) -> Arrival:
        return cls(request_id, time.monotonic(), time.time())


class Output:
    """The emissions of one HTTP request's prompts, as they come. Close it always: closing cancels what still runs."""

    def __init__(self, engine: EngineThread) -> None:
        self._engine = engine
        self._queue: asyncio.Queue[tuple[int, Emission] | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._open: dict[int, GenerationRequest] = {}
        self._watcher: asyncio.Task[None] | None = None

    def start(self, index: int, request: GenerationRequest) -> None:
        self._open[index] = request
        self._engine.submit(request)

    def deliverer(self, index: int) -> Callable[[Emission], None]:
        """What the engine's thread calls for the prompt at ``index``."""

        def deliver(emission: Emission) -> None:
            # A closed loop means that the process is ending and nobody waits for this.
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, emission))

        return deliver

    def watch(self, receive: Callable[[], Awaitable[Any]]) -> None:
        """Ends the iteration with ``ClientGoneError`` when the connection closes."""

        async def until_gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self._queue.put_nowait(None)

        self._watcher = asyncio.create_task(until_gone())

    async def emissions(self) -> AsyncIterator[tuple[int, Emission]]:
        """Yields until every prompt has finished.

        Raises:
            ClientGoneError: the client went away.
            OverloadedError: the engine refused one of the prompts in its queue.
            EngineError: the engine failed one of them.
        """
        while self._open:
            item = await self._queue.get()
            if item is None:
                raise ClientGoneError
            index, emission = item
            if emission.finish is not None:
                self._open.pop(index, None)
            if emission.error is not None:
                raise emission.error
            yield index, emission

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        for request in self._open.values():
            self._engine.cancel(request)
        self._open.clear()


@dataclass(frozen=True, slots=True)
class Service:
    """One served model. ``max_queue`` bounds the requests that wait for admission."""

    engine: EngineThread
    model: ServedModel
    telemetry: Telemetry
    gate: Gate
    max_queue: int
    injection: Injection | None

    @property
    def context_tokens(self) -> int:
        """The most tokens of prompt and output together."""
        return min(self.model.max_context_tokens, self.engine.capacity_tokens)

    def num_fitting_tokens(self, num_prompt_tokens: int, max_output_tokens: int | None) -> int:
        """How many output tokens fit beside a prompt. Raises ``RequestError`` when that is too few."""
        limit = self.context_tokens
        num_left = limit - num_prompt_tokens
        wanted = 1 if max_output_tokens is None else max_output_tokens
        if num_left < wanted:
            raise RequestError(
                f"this engine's context length is {limit} tokens; the prompt has {num_prompt_tokens} and "
                f"{wanted} are wanted for the output: shorten the prompt or lower max_tokens",
                param="prompt" if num_left < 1 else "max_tokens",
                code="context_length_exceeded",
            )
        return num_left

    def open(
        self,
        prompts: Sequence[tuple[tuple[int, ...], SamplingParams]],
        arrival: Arrival,
        queueing: Queueing,
    ) -> Output:
        """Starts all prompts or none.

        Raises:
            OverloadedError: the engine drains, or its queue has no room for all of them.
            EngineError: the engine cannot serve.
        """
        self._check_room(len(prompts), arrival)
        output = Output(self.engine)
        for index, (token_ids, sampling) in enumerate(prompts):
            request_id = arrival.request_id if len(prompts) == 1 else f"{arrival.request_id}-{index}"
            deliver = output.deliverer(index)
            output.start(
                index,
                GenerationRequest(
                    request_id, token_ids, sampling, arrival.monotonic_s, arrival.unix_s, deliver, queueing
                ),
            )
        return output

    def publish_info(self) -> None:
        """Publishes ``trimtab_engine_info``; call it again when knobs have changed."""
        configuration = self.engine.configuration
        self.telemetry.metrics.set_info(
            {
                "version": __version__,
                "model": self.model.name,
                "model_digest": self.model.digest,
                "configuration": configuration.id,
                "quantization": str(configuration["quantization"]),
                "inject": "" if self.injection is None else self.injection.label,
            }
        )

    def _check_room(self, num_prompts: int, arrival: Arrival) -> None:
        if self.engine.fatal is not None:
            raise EngineError(f"the engine cannot serve: {self.engine.fatal}")
        try:
            self.gate.check()
            if self.engine.num_waiting + num_prompts > self.max_queue:
                raise OverloadedError(
                    f"the queue is full: {self.engine.num_waiting} requests wait, {num_prompts} more came, and "
                    f"{self.max_queue} may wait; try again later",
                    retry_after_s=RETRY_AFTER_S,
                )
        except OverloadedError:
            self._record_refusal(arrival)
            raise

    def _record_refusal(self, arrival: Arrival) -> None:
        timeline = Timeline(arrival.monotonic_s, arrival.unix_s)
        record = timeline.record(Ending(arrival.request_id, RequestOutcome.REFUSED, 0, 0), time.monotonic())
        self.telemetry.records.add(record)
        self.telemetry.metrics.count_ending(record)
