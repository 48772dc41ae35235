"""The client process: reads load jobs from its standard input, one JSON line each, and answers one line each.

``client_process`` starts it pinned to the client's cores. It ends when its input does, so it cannot outlive the
process that started it.
"""

from __future__ import annotations

import asyncio
import os
import sys

from pydantic import TypeAdapter

from trimtab.experiments.load.generator import LoadGenerator
from trimtab.experiments.load.result import LoadJob, LoadResult

MAX_LINE_BYTES = 1 << 30
_JOB = TypeAdapter(LoadJob)
_RESULT = TypeAdapter(LoadResult)


async def serve(cpus: tuple[int, ...]) -> None:
    """Answers jobs until standard input ends; a job in flight is then cancelled."""
    if cpus:
        os.sched_setaffinity(0, cpus)
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    next_line = asyncio.create_task(lines.readline())
    while line := await next_line:
        next_line = asyncio.create_task(lines.readline())
        job = _JOB.validate_json(line)
        running = asyncio.create_task(LoadGenerator(job).run())
        await asyncio.wait((running, next_line), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():  # the parent sends one job at a time: a line now means that it is gone
            running.cancel()
            await asyncio.wait((running,))
            return
        sys.stdout.buffer.write(_RESULT.dump_json(running.result()) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    asyncio.run(serve(tuple(int(cpu) for cpu in sys.argv[1].split(",") if cpu)))
