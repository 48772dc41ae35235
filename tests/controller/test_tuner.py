"""What the tuner remembers: a gate holds only for what it was passed under, a winner is rolled out once."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
import yaml

from trimtab.controller.cores import CoreSets
from trimtab.controller.loop import ControlLoop, LoopParts
from trimtab.controller.rollout.repository import RolloutRequest, Rollouts
from trimtab.controller.settings import Settings
from trimtab.controller.store.store import Store
from trimtab.controller.store.tables import RolloutRow
from trimtab.controller.targets import put_target
from trimtab.controller.tuner import Tuner, TunerParts, Winner
from trimtab.engine.adapters.embedded import CATALOGUE
from trimtab.engine.registry import adapter
from trimtab.policies.manifest import TunedEngine, TuningPolicy

CHAT = yaml.safe_load((files("trimtab.policies") / "presets/chat.yaml").read_text())
TARGET = {
    "apiVersion": "trimtab.dev/v1alpha1",
    "kind": "TunedEngine",
    "metadata": {"name": "chat"},
    "spec": {"policy": "chat", "model": "m", "port": 8100},
}
INT4 = CATALOGUE.configuration({"quantization": "int4"})


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(tmp_path / "home")
    put(opened, tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def tuner(store: Store, tmp_path: Path) -> Tuner:
    (tmp_path / "model.gguf").write_bytes(b"weights")
    where = Settings(tmp_path / "home", tmp_path / "cache", None)
    cores = CoreSets(((0,),) * 3, None, (1,), None)
    parts = TunerParts(store, "chat", adapter("embedded"), None, cores, tmp_path / "model.gguf", where)  # type: ignore[arg-type]
    return Tuner(parts)


def put(store: Store, folder: Path, *, policy: dict[str, object] | None = None, cpus: int = 1) -> None:
    """Puts the manifests in force, with ``policy`` over the preset's spec."""
    spec = CHAT["spec"] | (policy or {})
    target = TARGET | {"spec": TARGET["spec"] | {"resources": {"cpus": cpus}}}  # type: ignore[operator]
    manifests = TunedEngine.model_validate(target), TuningPolicy.model_validate(CHAT | {"spec": spec})
    put_target(store, *manifests, folder, CATALOGUE)


def pass_gate(store: Store, tuner: Tuner) -> None:
    with store.write() as session:
        session.add(tuner._gate_row(INT4, passed=True, reason="kept all"))


@pytest.mark.parametrize("policy", [{"quality": {"maxKL": 0.001}}, {"slo": {"ttft": {"p95": "1ms"}}}])
def test_a_gate_passed_under_another_policy_counts_no_more(
    store: Store, tuner: Tuner, tmp_path: Path, policy: dict[str, object]
) -> None:
    pass_gate(store, tuner)
    assert tuner.gate(INT4.id) is not None
    put(store, tmp_path, policy=policy)
    assert tuner.gate(INT4.id) is None
    put(store, tmp_path)
    assert tuner.gate(INT4.id) is not None


def test_a_gate_passed_with_other_resources_counts_no_more(store: Store, tuner: Tuner, tmp_path: Path) -> None:
    pass_gate(store, tuner)
    put(store, tmp_path, cpus=2)
    assert tuner.gate(INT4.id) is None


def test_what_does_not_decide_a_trial_leaves_gates_valid(store: Store, tuner: Tuner, tmp_path: Path) -> None:
    pass_gate(store, tuner)
    put(store, tmp_path, policy={"triggers": {"cooldown": "1h"}})
    assert tuner.gate(INT4.id) is not None


def test_a_winner_whose_rollout_was_rolled_back_before_it_was_settled_starts_no_second_one(
    store: Store, tuner: Tuner
) -> None:
    rollouts = Rollouts(store, "chat", CATALOGUE)
    parts = LoopParts(store, "chat", CATALOGUE, None, rollouts, tuner, None, lambda: None)  # type: ignore[arg-type]
    winner = Winner(INT4, tuner.create("manual"))
    rollout_id = rollouts.start(RolloutRequest(INT4, f"experiment {winner.experiment_id}", "loop"))
    with store.write() as session:
        session.get_one(RolloutRow, rollout_id).phase = "rolled_back"
    ControlLoop(parts)._promote(winner)
    assert len(rollouts.all()) == 1
    assert tuner.unfinished() is None
