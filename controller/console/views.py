"""What the API and the page show: plain dictionaries made from the store. No logic of its own."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sqlalchemy import select

from trimtab.controller.loop import LoopStatus
from trimtab.controller.rollout.machine import desired
from trimtab.controller.rollout.repository import state_of
from trimtab.controller.store.store import Store
from trimtab.controller.store.tables import DecisionRow, ExperimentRow, ProcessRow, RolloutRow, TargetRow
from trimtab.engine.contract import Configuration
from trimtab.policies.manifest import TunedEngine, TuningPolicy

NUM_DECISIONS = 20


def target_view(store: Store, name: str) -> dict[str, Any]:
    with store.read() as session:
        row = session.get_one(TargetRow, name)
        stable = session.get(ProcessRow, row.stable_process_id) if row.stable_process_id else None
    manifest = TunedEngine.model_validate(row.target_manifest)
    return {
        "name": name,
        "policy": manifest.spec.policy,
        "engine": manifest.spec.engine,
        "model": manifest.spec.model,
        "url": f"http://127.0.0.1:{manifest.spec.port}",
        "configuration": row.stable_configuration,
        "configuration_id": configuration_id(row.stable_configuration),
        "stable_pid": stable.pid if stable and stable.ended_unix_s is None else None,
    }


def experiment_view(row: ExperimentRow, *, full: bool) -> dict[str, Any]:
    """``full`` adds the result with every trial."""
    view = {
        "id": row.id,
        "target": row.target,
        "state": row.state,
        "trigger": row.trigger,
        "progress": row.progress,
        "reason": row.reason,
        "report_path": row.report_path,
        "started_unix_s": row.started_unix_s,
        "ended_unix_s": row.ended_unix_s,
    }
    return {**view, "result": row.result} if full else view


def rollout_view(store: Store, row: RolloutRow) -> dict[str, Any]:
    with store.read() as session:
        policy = TuningPolicy.model_validate(session.get_one(TargetRow, row.target).policy_manifest)
    rollout = policy.spec.rollout
    state = state_of(row)
    return {
        "id": row.id,
        "target": row.target,
        "phase": row.phase,
        "paused": row.paused,
        "step": row.step + 1,
        "num_steps": len(rollout.steps),
        "weights": {str(arm): weight for arm, weight in desired(rollout, state).weights.items()},
        "configuration": row.configuration,
        "configuration_id": configuration_id(row.configuration),
        "inject": row.inject,
        "origin": row.origin,
        "sentence": row.sentence,
        "verdict": row.verdict,
        "phase_entered_unix_s": row.phase_entered_unix_s,
        "started_unix_s": row.started_unix_s,
        "ended_unix_s": row.ended_unix_s,
    }


def decision_view(row: DecisionRow) -> dict[str, Any]:
    return {
        "sequence": row.sequence,
        "at_unix_s": row.at_unix_s,
        "actor": row.actor,
        "subject": row.subject,
        "kind": row.kind,
        "sentence": row.sentence,
        "inputs": row.inputs,
        "hash": row.hash,
    }


def state_view(store: Store, status: LoopStatus) -> dict[str, Any]:
    """Everything that the page and ``trimtab status`` show, latest first."""
    with store.read() as session:
        experiment = session.scalars(select(ExperimentRow).order_by(ExperimentRow.id.desc()).limit(1)).first()
        rollout = session.scalars(select(RolloutRow).order_by(RolloutRow.id.desc()).limit(1)).first()
        newest = select(DecisionRow).order_by(DecisionRow.sequence.desc()).limit(NUM_DECISIONS)
        decisions = list(session.scalars(newest))
    return {
        "now_unix_s": store.now(),
        "problem": status.problem,
        "target": {**target_view(store, status.target), "serving": status.serving},
        "traffic": asdict(status.traffic) if status.traffic else None,
        "experiment": experiment_view(experiment, full=False) if experiment else None,
        "rollout": rollout_view(store, rollout) if rollout else None,
        "decisions": [decision_view(d) for d in decisions],
    }


def configuration_id(values: dict[str, Any]) -> str:
    return Configuration(tuple(values.items())).id
