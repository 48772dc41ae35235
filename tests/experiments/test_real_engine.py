"""Quality and load against the real engine process and the real model."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from trimtab.engine.adapters.embedded import EmbeddedAdapter
from trimtab.engine.adapters.interface import Launch
from trimtab.engine.contract import EngineEndpoint
from trimtab.engine.process import ProcessSpec, exit_code, spawn, terminate
from trimtab.experiments.load.generator import LoadGenerator
from trimtab.experiments.load.result import LoadJob, Outcome
from trimtab.experiments.quality import calibration_pieces, compare, read_scores
from trimtab.experiments.workload.synthetic import Arrivals, LogNormalTokens, SyntheticWorkload

ADAPTER = EmbeddedAdapter()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def serving(model_path: Path, tmp_path: Path, quantization: str) -> AsyncIterator[EngineEndpoint]:
    configuration = ADAPTER.catalogue.configuration({"quantization": quantization, "kv_cache_bytes": 64 * 2**20})
    launch = Launch(model_path, "smol", configuration, free_port(), free_port(), "secret")
    command = ADAPTER.command(launch)
    log_path = tmp_path / f"{quantization}.log"
    process = spawn(ProcessSpec(command.argv, command.env, (), log_path), lambda _: None)
    endpoint = EngineEndpoint(f"http://127.0.0.1:{launch.port}", None, None, "smol")
    try:
        async with aiohttp.ClientSession() as http:
            while not await ADAPTER.client(http, endpoint).is_ready():
                assert exit_code(process) is None, log_path.read_text()
                await asyncio.sleep(0.1)
        yield endpoint
    finally:
        terminate(process, 10.0)


@pytest.mark.model
async def test_int8_weights_move_the_answers_a_little_and_the_reference_not_at_all(
    model_path: Path, tmp_path: Path
) -> None:
    scores = {}
    for quantization in ("fp32", "int8"):
        async with serving(model_path, tmp_path, quantization) as endpoint, aiohttp.ClientSession() as http:
            scores[quantization] = await read_scores(http, endpoint, calibration_pieces(1))
    same, moved = (compare(scores["fp32"], scores[q]) for q in ("fp32", "int8"))
    assert same.kl_nats == pytest.approx(0.0, abs=1e-9)
    assert 10 < same.perplexity < 100
    assert 0 < moved.kl_nats < 0.05
    assert abs(moved.perplexity_increase_ratio) < 0.05


@pytest.mark.model
async def test_a_load_pins_lengths_and_loses_nothing(model_path: Path, tmp_path: Path) -> None:
    workload = SyntheticWorkload(4.0, Arrivals(), LogNormalTokens(24, 0.3, 64), LogNormalTokens(8, 0.3, 16), 1)
    async with serving(model_path, tmp_path, "int8") as endpoint:
        job = LoadJob(endpoint.base_url, "smol", workload.requests(2.0), 4.0, 2.0, 60.0)
        load = await LoadGenerator(job).run()
    assert {r.outcome for r in load.results} == {Outcome.SUCCEEDED}
    assert [r.output_tokens for r in load.results] == [r.output_tokens for r in job.requests]
    assert all(r.ttft_s is not None and r.tpot_s is not None and r.ttft_s > 0 for r in load.results)
