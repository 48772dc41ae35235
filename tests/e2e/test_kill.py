"""kill -9 of the controller in each state of a rollout: traffic goes on, and the next one puts all in order."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from trimtab.controller.rollout.machine import FINAL

pytestmark = pytest.mark.kill

NEW = {"max_num_seqs": 4}


def check_order(installation: Any, rollout_id: int) -> None:
    """One stable configuration, exactly its process, all requests to it, and a whole decision log."""
    state = installation.api.get("/state")
    phase = installation.phase(rollout_id)
    assert phase in FINAL
    expected = 4 if phase == "succeeded" else 8
    assert state["target"]["configuration"]["max_num_seqs"] == expected
    stable = state["target"]["stable_pid"]
    installation.until(lambda: installation.engine_pids() == {stable}, "an orphan replica is left")
    assert list(installation.routes().values()) == [100]
    installation.until(lambda: installation.api.get("/state")["target"]["serving"], "it does not serve")
    decisions = installation.api.get("/decisions")
    assert [d["sequence"] for d in decisions] == list(range(1, len(decisions) + 1))


def check_traffic(totals: dict[str, Any]) -> None:
    assert totals["sent"] > 20
    assert totals["failed"] == totals["lost"] == totals["refused"] == 0, totals
    assert totals["succeeded"] == totals["sent"]


def kill_and_restart(installation: Any, pause_s: float = 2.0) -> None:
    """Leaves the traffic without a controller for a while."""
    installation.kill_controller()
    time.sleep(pause_s)
    installation.start()


def test_killed_while_starting(install: Callable[..., Any], users: Callable[..., Any]) -> None:
    installation = install()
    traffic = users(installation)
    rollout_id = installation.start_rollout(NEW)
    installation.until(lambda: len(installation.engine_pids()) > 1, "no replica starts")
    assert installation.phase(rollout_id) == "starting"
    kill_and_restart(installation, 0.0)
    installation.until_phase(rollout_id, "succeeded")
    check_order(installation, rollout_id)
    check_traffic(traffic.stop())


def test_killed_while_stepping(install: Callable[..., Any], users: Callable[..., Any]) -> None:
    installation = install(min_requests=20)
    traffic = users(installation)
    rollout_id = installation.start_rollout(NEW)
    installation.until_phase(rollout_id, "stepping")
    before = installation.engine_pids()
    time.sleep(2)
    kill_and_restart(installation)
    assert installation.phase(rollout_id) == "stepping"
    assert installation.engine_pids() == before  # adopted, not started again
    assert sorted(installation.routes().values()) == [30, 30, 40]
    installation.until_phase(rollout_id, "succeeded")
    check_order(installation, rollout_id)
    check_traffic(traffic.stop())


def test_killed_while_promoting(install: Callable[..., Any], users: Callable[..., Any]) -> None:
    installation = install()
    traffic = users(installation)
    rollout_id = installation.start_rollout(NEW)
    installation.until_phase(rollout_id, "promoting")
    kill_and_restart(installation)
    installation.until_phase(rollout_id, "succeeded")
    check_order(installation, rollout_id)
    check_traffic(traffic.stop())


def test_killed_while_rolling_back(install: Callable[..., Any], users: Callable[..., Any]) -> None:
    installation = install(min_requests=100_000)
    traffic = users(installation)
    rollout_id = installation.start_rollout(NEW)
    installation.until_phase(rollout_id, "stepping")
    time.sleep(2)
    installation.api.post(f"/rollouts/{rollout_id}/abort")
    installation.until_phase(rollout_id, "rolling_back")
    kill_and_restart(installation)
    installation.until_phase(rollout_id, "rolled_back")
    check_order(installation, rollout_id)
    check_traffic(traffic.stop())


def test_killed_after_the_end(install: Callable[..., Any], users: Callable[..., Any]) -> None:
    """Between the write that makes the canary stable and the end of the old replicas."""
    installation = install()
    traffic = users(installation)
    rollout_id = installation.start_rollout(NEW)
    installation.until_phase(rollout_id, "succeeded")
    kill_and_restart(installation)
    check_order(installation, rollout_id)
    check_traffic(traffic.stop())


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(5))
def test_killed_at_random_instants(install: Callable[..., Any], users: Callable[..., Any], seed: int) -> None:
    rng = random.Random(seed)
    installation = install()
    traffic = users(installation)
    rollout_id = installation.start_rollout(NEW)
    for _ in range(6):
        time.sleep(rng.uniform(0.0, 4.0))
        kill_and_restart(installation, rng.uniform(0.0, 1.0))
    installation.until_phase(rollout_id, *FINAL)
    check_order(installation, rollout_id)
    check_traffic(traffic.stop())


@pytest.mark.parametrize(("number", "within_s"), [(signal.SIGKILL, 5), (signal.SIGSTOP, 10)])
def test_a_killed_or_hanging_canary_rolls_back_at_once(
    install: Callable[..., Any], users: Callable[..., Any], number: signal.Signals, within_s: float
) -> None:
    installation = install(min_requests=100_000)
    traffic = users(installation)
    rollout_id = installation.start_rollout(NEW)
    stable = installation.api.get("/state")["target"]["stable_pid"]
    installation.until_phase(rollout_id, "stepping")
    canary = installation.canary_pid(rollout_id)
    assert canary != stable
    killed_at = time.monotonic()
    os.kill(canary, number)
    installation.until_phase(rollout_id, "rolling_back", "rolled_back")
    assert time.monotonic() - killed_at < within_s
    installation.until_phase(rollout_id, "rolled_back")
    rollout = installation.api.get(f"/rollouts/{rollout_id}")
    assert "canary" in rollout["sentence"]
    check_order(installation, rollout_id)
    totals = traffic.stop()
    # What the replica was serving, or did not answer, is cut, and counted; nothing is lost from the count.
    assert totals["lost"] == totals["refused"] == 0
    assert totals["failed"] <= 4 * within_s  # its share of the four requests a second, and some to spare


def test_a_killed_stable_replica_and_envoy_are_started_again(install: Callable[..., Any]) -> None:
    installation = install()
    before = installation.api.get("/state")["target"]["stable_pid"]
    os.kill(before, signal.SIGKILL)
    installation.until(
        lambda: (t := installation.api.get("/state")["target"])["serving"] and t["stable_pid"] not in (before, None),
        "the stable replica does not come back",
    )
    for process in installation.envoy_pids():
        os.kill(process, signal.SIGKILL)
    installation.until(lambda: installation.chat_status() == 200, "Envoy does not come back")
