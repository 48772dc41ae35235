"""Puts manifests into the store: which target is tuned, under which policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from sqlalchemy import select

from trimtab.controller.backends.interface import ReplicaRole
from trimtab.controller.proxy import running_processes
from trimtab.controller.store.decisions import DecisionNote
from trimtab.controller.store.store import Store
from trimtab.controller.store.tables import TargetRow
from trimtab.engine.contract import KnobCatalogue
from trimtab.errors import ControllerError, ManifestError
from trimtab.policies.manifest import Manifest, TunedEngine, TuningPolicy
from trimtab.policies.yaml_source import parse_manifests


def read_manifests(files: Sequence[Path], catalogues: Mapping[str, KnobCatalogue]) -> list[Manifest]:
    """Every manifest in ``files``, in order. Raises ``ManifestError``."""
    manifests: list[Manifest] = []
    for file in files:
        try:
            text = file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ManifestError(f"{file}: cannot be read: {error}") from error
        manifests += parse_manifests(text, str(file), catalogues)
    return manifests


def target_and_policy(manifests: Sequence[Manifest]) -> tuple[TunedEngine, TuningPolicy]:
    """The one target and the policy that it names. Raises ``ManifestError``."""
    targets = [m for m in manifests if isinstance(m, TunedEngine)]
    policies = {m.metadata.name: m for m in manifests if isinstance(m, TuningPolicy)}
    if len(targets) != 1:
        raise ManifestError(f"found {len(targets)} TunedEngine manifests; accepted: exactly one")
    policy = policies.get(targets[0].spec.policy)
    if policy is None:
        names = ", ".join(policies) or "none"
        raise ManifestError(
            f"target {targets[0].metadata.name} names policy {targets[0].spec.policy!r}; given: {names}"
        )
    return targets[0], policy


def refuse_changed_service(store: Store, target: TunedEngine) -> None:
    """Raises ``ControllerError`` when replicas or Envoy still serve ``target`` with another model, engine or port.

    They would be adopted and go on as they were, whatever the manifest says.
    """
    with store.read() as session:
        known = session.get(TargetRow, target.metadata.name)
    if known is None or all(row.role == ReplicaRole.TRIAL for row in running_processes(store)):
        return
    served = TunedEngine.model_validate(known.target_manifest).spec
    for name in ("engine", "model", "port"):
        old, new = getattr(served, name), getattr(target.spec, name)
        if old != new:
            raise ControllerError(
                f"target {target.metadata.name} is being served with spec.{name} {old!r}, and the manifest says "
                f"{new!r}; `trimtab down` ends what serves, then start again"
            )


def put_target(
    store: Store, target: TunedEngine, policy: TuningPolicy, folder: Path, catalogue: KnobCatalogue
) -> None:
    """Stores the manifests. A target that is already there keeps its stable configuration.

    Raises:
        ControllerError: another target lives in this store.
    """
    name = target.metadata.name
    with store.read() as session:
        others = [n for n in session.scalars(select(TargetRow.name)) if n != name]
        known = session.get(TargetRow, name)
    if others:
        raise ControllerError(f"this home already has target {others[0]!r}; use another TRIMTAB_HOME for {name!r}")
    manifests = {
        "target_manifest": target.model_dump(mode="json", by_alias=True, exclude_none=True),
        "policy_manifest": policy.model_dump(mode="json", by_alias=True, exclude_none=True),
        "manifest_folder": str(folder),
    }
    if known is not None and all(getattr(known, key) == value for key, value in manifests.items()):
        return
    note = DecisionNote("person", f"target {name}", "manifests", f"Manifests of {name} were put in force.", manifests)
    with store.write(note) as session:
        row = session.get(TargetRow, name)
        if row is None:
            stable = catalogue.configuration(target.spec.configuration)
            session.add(TargetRow(name=name, stable_configuration=dict(stable), **manifests))
        else:
            for key, value in manifests.items():
                setattr(row, key, value)
