"""kill -9 of a searching process: the next one repeats no finished trial, loses none, and nothing is left behind."""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import psutil
import pytest

from trimtab.experiments.fake_host import FakeHost
from trimtab.experiments.load.client_process import LoadClient
from trimtab.experiments.plan import ExperimentPlan
from trimtab.experiments.search import search
from trimtab.experiments.study import Study
from trimtab.experiments.trial import FailureKind, TrialRunner

MakePlan = Callable[..., ExperimentPlan]

SEARCHER = """
import asyncio, pickle, sys
import aiohttp
from trimtab.experiments.fake_host import FakeHost
from trimtab.experiments.load.client_process import LoadClient
from trimtab.experiments.search import search
from trimtab.experiments.study import Study
from trimtab.experiments.trial import TrialRunner

def tell(event):
    print(type(event).__name__, flush=True)

async def main(plan):
    async with LoadClient(()) as client, aiohttp.ClientSession() as http:
        with Study(plan) as study:
            await search(plan, TrialRunner(plan, FakeHost(), client, http), study, tell)

asyncio.run(main(pickle.load(open(sys.argv[1], "rb"))))
"""


@pytest.mark.kill
async def test_a_killed_search_is_resumed_without_loss(make_plan: MakePlan, tmp_path: Path) -> None:
    space = {"quantization": ["bf16", "int8"], "max_num_seqs": {"low": 4, "high": 64, "log": True}}
    plan = make_plan(
        {"search": {"space": space, "budget": {"trials": 5}, "trial": {"warmup": "0s", "duration": "700ms"}}}
    )
    (tmp_path / "plan").write_bytes(pickle.dumps(plan))
    command = [sys.executable, "-P", "-c", SEARCHER, str(tmp_path / "plan")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as searcher:
        assert searcher.stdout is not None
        told: list[str] = []
        while told.count("TrialStarted") < 3:
            told.append(searcher.stdout.readline().strip())
            assert told[-1], "the search ended before it could be killed"
        children = psutil.Process(searcher.pid).children(recursive=True)
        os.kill(searcher.pid, signal.SIGKILL)
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert gone
    assert not alive
    with Study(plan) as study:
        before = {r.number: r.outcome.configuration for r in study.records()}
    assert len(before) == 2
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(LoadClient(()))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        runner = TrialRunner(plan, FakeHost(), client, http)
        stack.push_async_callback(runner.close)
        study = stack.enter_context(Study(plan))
        began = time.monotonic()
        records = await search(plan, runner, study, lambda _: None)
        assert time.monotonic() - began < 60
    counted = [r for r in records if r.counts]
    assert len(counted) == 5
    assert len({r.outcome.configuration for r in counted}) == 5
    assert {r.number: r.outcome.configuration for r in records}.items() >= before.items()
    interrupted = [r for r in records if r.outcome.failure and r.outcome.failure.kind is FailureKind.INTERRUPTED]
    assert len(interrupted) == 1
    assert interrupted[0].outcome.configuration in {r.outcome.configuration for r in counted}
