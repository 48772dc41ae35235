"""The load command as a process: totals that others can read, and a clean stop at SIGTERM."""

import asyncio
import json
import signal
import sys
from pathlib import Path

from trimtab.engine.fake_server import FakeEngine, FakeScript


async def start(url: str, path: Path, *more: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "trimtab.experiments.load", "--url", url, "--model", "fake", "--json", str(path),
        "--output-median", "4", "--output-max", "8", *more, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def test_sigterm_finishes_what_is_in_flight_and_writes_the_totals(tmp_path: Path) -> None:
    engine, path = FakeEngine(FakeScript(ttft_s=0.3), {}), tmp_path / "load.json"
    endpoint = await engine.start()
    process = await start(endpoint.base_url, path, "--rate", "20", "--duration", "600")
    while not path.exists() or json.loads(path.read_text())["succeeded"] < 5:
        await asyncio.sleep(0.05)
    running = json.loads(path.read_text())
    assert not running["finished"]
    assert running["lost"] == 0
    process.send_signal(signal.SIGTERM)
    told, _ = await process.communicate()
    await engine.stop()
    totals = json.loads(path.read_text())
    assert process.returncode == 0
    assert totals["finished"]
    assert totals["failed"] == totals["lost"] == totals["refused"] == 0
    assert totals["sent"] == totals["succeeded"] == engine.num_completions
    assert sum(row["succeeded"] for row in totals["timeline"]) == totals["sent"]
    assert totals["ttft_s"]["p50"] >= 0.3
    assert told.decode().startswith(f"sent {totals['sent']}, succeeded")


async def test_failures_are_counted_by_kind(tmp_path: Path) -> None:
    engine, path = FakeEngine(FakeScript(fail_every=2), {}), tmp_path / "load.json"
    endpoint = await engine.start()
    process = await start(endpoint.base_url, path, "--rate", "50", "--duration", "0.4", "--arrivals", "constant")
    await process.communicate()
    await engine.stop()
    totals = json.loads(path.read_text())
    assert totals["kinds"] == {"http_500": totals["failed"]}
    assert totals["sent"] == totals["succeeded"] + totals["failed"]


async def test_no_rate_is_one_clear_error(tmp_path: Path) -> None:
    process = await start("http://127.0.0.1:9", tmp_path / "load.json", "--duration", "1")
    await process.communicate()
    assert process.returncode == 2
