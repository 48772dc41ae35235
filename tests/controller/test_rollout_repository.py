"""The stored rollout: what a person asks while the loop decides is never lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
import yaml

from trimtab.controller.rollout.machine import Phase, RolloutCommand, Transition
from trimtab.controller.rollout.repository import RolloutRequest, Rollouts, state_of
from trimtab.controller.store.store import Store
from trimtab.controller.store.tables import TargetRow
from trimtab.engine.adapters.embedded import CATALOGUE

CHAT = yaml.safe_load((files("trimtab.policies") / "presets/chat.yaml").read_text())


@pytest.fixture
def rollouts(tmp_path: Path) -> Iterator[Rollouts]:
    store = Store.open(tmp_path, lambda: 1000.0)
    with store.write() as session:
        session.add(
            TargetRow(
                name="chat",
                target_manifest={},
                policy_manifest=CHAT,
                manifest_folder="/",
                stable_configuration=dict(CATALOGUE.configuration({})),
            )
        )
    yield Rollouts(store, "chat", CATALOGUE)
    store.close()


@pytest.mark.parametrize("verb", ["abort", "promote", "pause"])
def test_a_command_that_arrives_while_the_loop_decides_comes_first(rollouts: Rollouts, verb: str) -> None:
    configuration = CATALOGUE.configuration({"quantization": "int4"})
    rollout_id = rollouts.start(RolloutRequest(configuration, "a test", "person"))
    started = rollouts.get(rollout_id)
    stepping = replace(state_of(started), phase=Phase.STEPPING)
    assert rollouts.transition(started, Transition(stepping, "step", "Step 1."), None)
    read = rollouts.get(rollout_id)
    rollouts.command(rollout_id, verb)
    promoting = replace(state_of(read), phase=Phase.PROMOTING)
    assert not rollouts.transition(read, Transition(promoting, "promote", "All requests go to it."), None)
    stored = rollouts.get(rollout_id)
    assert stored.phase == Phase.STEPPING
    assert stored.paused == (verb == "pause")
    assert stored.command == (None if verb == "pause" else RolloutCommand(verb))
    assert rollouts.transition(stored, Transition(promoting, "promote", "All requests go to it."), None)
