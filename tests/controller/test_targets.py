"""Manifests become the store's one target, and a restart never forgets what was promoted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
from sqlalchemy import select

from trimtab.controller.store.store import Store
from trimtab.controller.store.tables import DecisionRow, ProcessRow, TargetRow
from trimtab.controller.targets import put_target, read_manifests, refuse_changed_service, target_and_policy
from trimtab.engine.adapters.embedded import CATALOGUE
from trimtab.engine.process import ProcessRecord, own_record
from trimtab.errors import ControllerError, ManifestError
from trimtab.policies.manifest import TunedEngine, TuningPolicy

CATALOGUES = {"embedded": CATALOGUE}
CHAT = (files("trimtab.policies") / "presets/chat.yaml").read_text()
TARGET = """
apiVersion: trimtab.dev/v1alpha1
kind: TunedEngine
metadata: {name: smol}
spec: {policy: chat, model: smollm2-135m-instruct, port: 8000, configuration: {max_num_seqs: 4}}
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(tmp_path / "home")
    yield opened
    opened.close()


def both(target: str = TARGET, policy: str = CHAT, *, folder: Path) -> tuple[TunedEngine, TuningPolicy]:
    (folder / "policy.yaml").write_text(policy)
    (folder / "target.yaml").write_text(target)
    return target_and_policy(read_manifests([folder / "policy.yaml", folder / "target.yaml"], CATALOGUES))


def row(store: Store, name: str = "smol") -> TargetRow:
    with store.read() as session:
        return session.get_one(TargetRow, name)


def num_decisions(store: Store) -> int:
    with store.read() as session:
        return len(session.scalars(select(DecisionRow)).all())


def test_target_and_policy_may_lie_in_two_files(tmp_path: Path) -> None:
    target, policy = both(folder=tmp_path)
    assert (target.metadata.name, policy.metadata.name) == ("smol", "chat")


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_an_unreadable_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "policy.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ManifestError, match=r"policy\.yaml: cannot be read"):
        read_manifests([path], CATALOGUES)


def test_a_folder_is_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="cannot be read"):
        read_manifests([tmp_path], CATALOGUES)


def test_there_is_exactly_one_target(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="found 2 TunedEngine manifests; accepted: exactly one"):
        both(TARGET + "---" + TARGET, folder=tmp_path)
    (tmp_path / "policy.yaml").write_text(CHAT)
    with pytest.raises(ManifestError, match="found 0 TunedEngine"):
        target_and_policy(read_manifests([tmp_path / "policy.yaml"], CATALOGUES))


def test_a_policy_that_is_not_given_is_named_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="smol names policy 'other'; given: chat"):
        both(TARGET.replace("policy: chat", "policy: other"), folder=tmp_path)


def test_a_new_target_starts_at_its_manifest_s_configuration(store: Store, tmp_path: Path) -> None:
    put_target(store, *both(folder=tmp_path), tmp_path, CATALOGUE)
    assert row(store).stable_configuration == dict(CATALOGUE.configuration({"max_num_seqs": 4}))
    assert num_decisions(store) == 1


def test_the_same_manifests_again_change_and_record_nothing(store: Store, tmp_path: Path) -> None:
    for _ in range(2):
        put_target(store, *both(folder=tmp_path), tmp_path, CATALOGUE)
    assert num_decisions(store) == 1


def test_changed_manifests_keep_what_was_promoted(store: Store, tmp_path: Path) -> None:
    put_target(store, *both(folder=tmp_path), tmp_path, CATALOGUE)
    promoted = dict(CATALOGUE.configuration({"max_num_seqs": 9}))
    with store.write() as session:
        session.get_one(TargetRow, "smol").stable_configuration = promoted
    changed = both(TARGET.replace("port: 8000", "port: 8001"), folder=tmp_path)
    put_target(store, *changed, tmp_path, CATALOGUE)
    assert row(store).stable_configuration == promoted
    assert row(store).target_manifest["spec"]["port"] == 8001
    assert num_decisions(store) == 2


@pytest.mark.parametrize(
    ("role", "changed", "refused"),
    [
        ("replica", "port: 8001", "spec.port 8000, and the manifest says 8001"),
        ("envoy", "model: /m.gguf", "spec.model 'smollm2-135m-instruct', and the manifest says '/m.gguf'"),
        ("trial", "port: 8001", None),
        ("replica", "configuration: {max_num_seqs: 5}", None),
    ],
)
def test_what_still_serves_keeps_its_model_and_port(
    store: Store, tmp_path: Path, role: str, changed: str, refused: str | None
) -> None:
    put_target(store, *both(folder=tmp_path), tmp_path, CATALOGUE)
    process = own_record()
    with store.write() as session:
        session.add(running_row(role, process))
    key = changed.split(":", maxsplit=1)[0]
    text = re.sub(rf"{key}: (\{{.*?\}}|[^,}}]+)", changed, TARGET)
    target, _ = both(text, folder=tmp_path)
    if refused is None:
        refuse_changed_service(store, target)
        return
    with pytest.raises(ControllerError, match=re.escape(refused)):
        refuse_changed_service(store, target)
    with store.write() as session:
        session.scalars(select(ProcessRow)).one().ended_unix_s = 1.0
    refuse_changed_service(store, target)


def running_row(role: str, process: ProcessRecord) -> ProcessRow:
    return ProcessRow(
        role=role,
        label=role,
        pid=process.pid,
        start_ticks=process.start_ticks,
        nonce=process.nonce,
        log_path="",
        cpus=[],
        base_url="",
        admin_url="",
        admin_token="",
        model="",
        configuration={},
        inject=None,
        started_unix_s=0.0,
        ended_unix_s=None,
    )


def test_a_home_holds_one_target(store: Store, tmp_path: Path) -> None:
    put_target(store, *both(folder=tmp_path), tmp_path, CATALOGUE)
    other = both(TARGET.replace("name: smol", "name: other"), folder=tmp_path)
    with pytest.raises(ControllerError, match="already has target 'smol'; use another TRIMTAB_HOME for 'other'"):
        put_target(store, *other, tmp_path, CATALOGUE)
    assert num_decisions(store) == 1
