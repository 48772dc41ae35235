"""The demo's figures: what an experiment's confirmation says of incumbent and winner, and the report's JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from trimtab.controller.rollout.machine import Phase
from trimtab.engine.contract import Configuration
from trimtab.experiments.result import ExperimentResult
from trimtab.policies.constraints import broken
from trimtab.policies.judge import Decision

_DECISIONS = {Phase.SUCCEEDED: Decision.PROMOTE, Phase.ROLLED_BACK: Decision.ROLLBACK}


@dataclass(frozen=True, slots=True)
class Summary:
    """One configuration's figures, averaged over its confirmation runs; ``None`` where none was measured."""

    configuration_id: str
    knobs: dict[str, Any]
    ttft_p95_s: float | None
    tpot_p95_s: float | None
    goodput_per_s: float | None
    kl_nats: float | None


def summary(result: ExperimentResult, configuration: Configuration) -> Summary:
    """Figures of ``configuration`` from the held-out confirmation runs of ``result``."""
    outcomes = [r.outcome for r in result.confirmation.runs if r.outcome.configuration == configuration]
    figures = [o.figures for o in outcomes if o.figures is not None]
    return Summary(
        configuration.id,
        dict(configuration),
        _mean([f.load.ttft_s.p95 for f in figures if f.load.ttft_s]),
        _mean([f.load.tpot_s.p95 for f in figures if f.load.tpot_s]),
        _mean([f.goodput_per_s for f in figures if f.goodput_per_s is not None]),
        _mean([f.quality.kl_nats for f in figures if f.quality]),
    )


def runner_up(result: ExperimentResult) -> Configuration | None:
    """The best configuration that kept every constraint offline and is neither winner nor incumbent."""
    kept = [
        record
        for record in result.records
        if record.score is not None
        and not broken(record.outcome.constraints)
        and record.outcome.configuration not in (result.winner, result.incumbent)
    ]
    best = max(kept, key=lambda record: record.score or 0.0, default=None)
    return best.outcome.configuration if best else None


def demo_report(
    requests: dict[str, int], before: Summary, after: Summary, rollouts: Sequence[dict[str, Any]], minutes: float
) -> dict[str, Any]:
    """The content of ``demo-report.json``."""
    return {
        "requests": {key: requests[key] for key in ("sent", "succeeded", "refused", "failed", "lost")},
        "before": asdict(before),
        "after": asdict(after),
        "rollouts": [
            {
                "configuration": r["configuration"],
                "inject": r["inject"],
                "decision": _DECISIONS[Phase(r["phase"])],
                "sentence": r["sentence"],
            }
            for r in rollouts
        ],
        "minutes": round(minutes, 2),
    }


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
