"""Ctrl-C at a command that only follows: it says that the work goes on, and the work does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

CLI = [sys.executable, "-P", "-m", "trimtab.controller.cli"]


def interrupted(installation: Any, *arguments: str, once_told: str) -> str:
    """What the command said until it ended, interrupted when a line had ``once_told`` in it."""
    env = {**os.environ, "TRIMTAB_HOME": str(installation.settings.home)}
    with subprocess.Popen([*CLI, *arguments], env=env, stderr=subprocess.PIPE, text=True) as following:
        assert following.stderr is not None
        for line in following.stderr:
            if once_told in line:
                break
        following.send_signal(signal.SIGINT)
        told = following.stderr.read()
        assert following.wait(20) == 130
    return told


def test_a_rollout_and_a_search_go_on_without_their_follower(install: Callable[..., Any]) -> None:
    installation = install()
    installation.until_serving()
    rollout_id = installation.start_rollout({"max_num_seqs": 4})
    told = interrupted(installation, "rollout", "watch", str(rollout_id), once_told=f"rollout {rollout_id}")
    assert "goes on in the controller" in told
    assert installation.phase(rollout_id) in ("starting", "stepping")
    installation.api.post(f"/rollouts/{rollout_id}/abort")
    installation.until_phase(rollout_id, "aborted", "rolled_back")
    told = interrupted(installation, "experiment", "start", once_told="trial 1")
    (experiment,) = installation.api.get("/experiments")
    assert f"experiment {experiment['id']} goes on in the controller" in told
    assert experiment["state"] == "running"
    ended = ("won", "finished")
    installation.until(lambda: installation.api.get("/experiments")[0]["state"] in ended, "the search does not end")
