"""The open-loop generator: sends each request at its intended time, whatever became of the others.

Latency is counted from the intended arrival. The client's own lateness is measured, on sends and on the event loop,
so that a trial whose client could not keep up is found out. It runs in a process of its own during trials
(``client_process``) and as ``python -m trimtab.experiments.load``.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

import aiohttp
import numpy as np

from trimtab.experiments.load.client import Progress, complete, request_body
from trimtab.experiments.load.result import LoadJob, LoadResult, Outcome, RequestResult

# Shorter than the 5 s after which uvicorn closes an idle connection: a request must not meet a closing one.
_KEEP_ALIVE_S = 2.0
_CONNECT_TIMEOUT_S = 10.0
_TICK_S = 0.02


class LoadGenerator:
    """Runs one job. ``stop`` ends the arrivals early; what is in flight is still finished."""

    def __init__(self, job: LoadJob, *, on_result: Callable[[RequestResult], None] | None = None) -> None:
        self._job = job
        self._on_result = on_result
        self._cache_salt = secrets.token_hex(8)
        self._stopped = asyncio.Event()
        self._in_flight: dict[asyncio.Task[None], Progress] = {}
        self._results: list[RequestResult] = []
        self._ticks_late_s: list[float] = []
        self.num_sent = 0

    @property
    def num_in_flight(self) -> int:
        """Requests sent and not ended."""
        return len(self._in_flight)

    def stop(self) -> None:
        """Sends nothing more. ``run`` returns once the answers in flight have come, or ``drain_s`` has passed."""
        self._stopped.set()

    async def run(self) -> LoadResult:
        """Sends the job's requests. On cancellation every connection is closed before it returns."""
        start = asyncio.get_running_loop().time()
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
            watch = asyncio.create_task(self._watch_loop())
            try:
                ended_s = await self._send_all(http, start)
                await self._drain(start + ended_s + self._job.drain_s)
            finally:
                watch.cancel()
                await self._cancel_in_flight()
        return self._result(ended_s, _now() - start)

    async def _send_all(self, http: aiohttp.ClientSession, start: float) -> float:
        """Returns when the arrivals ended, in seconds since ``start``."""
        for request in self._job.requests:
            body = request_body(self._job.model, request, self._cache_salt)
            if await self._stopped_before(start + request.at_s):
                return _now() - start
            progress = Progress(request, lambda: _now() - start)
            task = asyncio.create_task(self._send(http, body, progress))
            self._in_flight[task] = progress
            self.num_sent += 1
        if await self._stopped_before(start + self._job.duration_s):
            return _now() - start
        return self._job.duration_s

    async def _stopped_before(self, deadline: float) -> bool:
        """Waits until ``deadline`` or the stop; whether it was the stop."""
        try:
            async with asyncio.timeout_at(deadline):
                await self._stopped.wait()
        except TimeoutError:
            return False
        return True

    async def _send(self, http: aiohttp.ClientSession, body: bytes, progress: Progress) -> None:
        result = await complete(http, self._job.base_url, body, progress)
        task = asyncio.current_task()
        assert task is not None
        del self._in_flight[task]
        self._record(result)

    def _record(self, result: RequestResult) -> None:
        self._results.append(result)
        if self._on_result is not None:
            self._on_result(result)

    async def _drain(self, deadline: float) -> None:
        if self._in_flight:
            await asyncio.wait(self._in_flight, timeout=max(0.0, deadline - _now()))

    async def _cancel_in_flight(self) -> None:
        left = dict(self._in_flight)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for task, progress in left.items():
            # One may have ended between the drain and its cancellation; it has recorded itself.
            if self._in_flight.pop(task, None) is not None:
                self._record(progress.result(Outcome.FAILED, "deadline"))

    async def _watch_loop(self) -> None:
        while True:
            due = _now() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self._ticks_late_s.append(_now() - due)

    def _result(self, duration_s: float, finished_s: float) -> LoadResult:
        sends_late_s = [r.sent_s - r.intended_s for r in self._results]
        lag_s = max((float(np.percentile(x, 99)) for x in (sends_late_s, self._ticks_late_s) if x), default=0.0)
        results = tuple(sorted(self._results, key=lambda r: r.index))
        return LoadResult(self._job.rate_per_s, duration_s, finished_s, lag_s, results)


def _now() -> float:
    return asyncio.get_running_loop().time()
