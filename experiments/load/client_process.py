"""The load client as trials see it: a process of its own on the client's cores, kept for a whole experiment.

Its own process, because the controller's event loop must not delay a send and the client must not take the engine's
cores. Kept, because starting one costs as much as a short load.
"""

from __future__ import annotations

import asyncio
import sys
from types import TracebackType

from pydantic import TypeAdapter, ValidationError

from trimtab.errors import ExperimentError
from trimtab.experiments.load.result import LoadJob, LoadResult
from trimtab.experiments.load.worker import MAX_LINE_BYTES

_JOB = TypeAdapter(LoadJob)
_RESULT = TypeAdapter(LoadResult)
_SLACK_S = 30.0  # beyond a job's own deadline before the client counts as hung


class LoadClient:
    """Runs one job at a time. Use as an async context manager; nothing is left running after it."""

    def __init__(self, cpus: tuple[int, ...]) -> None:
        self._cpus = cpus
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> LoadClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def run(self, job: LoadJob) -> LoadResult:
        """Sends the job's load. A cancelled call ends the client process, which closes its connections.

        Raises:
            ExperimentError: the client process died or hung.
        """
        process = self._process = self._process or await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        answered = False
        try:
            process.stdin.write(_JOB.dump_json(job) + b"\n")
            await process.stdin.drain()
            async with asyncio.timeout(job.duration_s + job.drain_s + _SLACK_S):
                line = await process.stdout.readline()
            result = _RESULT.validate_json(line)
            answered = True
        except (TimeoutError, ValidationError, ConnectionError) as error:
            raise ExperimentError(f"the load client gave no result: {type(error).__name__}") from error
        finally:
            if not answered:
                await self._end()
        return result

    async def _start(self) -> asyncio.subprocess.Process:
        cpus = ",".join(map(str, self._cpus))
        return await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "trimtab.experiments.load.worker", cpus,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=MAX_LINE_BYTES,
            start_new_session=True,  # Ctrl-C is ours to handle
        )  # fmt: skip

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        # Closes the pipes too, which the event loop would otherwise warn about.
        await process.communicate()
