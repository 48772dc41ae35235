"""Plans whose trials take about a second, on fake engines."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from trimtab.engine.adapters.embedded import EmbeddedAdapter
from trimtab.experiments.memory import ModelFacts
from trimtab.experiments.plan import Devices, ExperimentPlan, Limits
from trimtab.experiments.workload.synthetic import Arrivals, LogNormalTokens, SyntheticWorkload
from trimtab.policies.manifest import PolicySpec

MakePlan = Callable[..., ExperimentPlan]


def policy(**changes: object) -> PolicySpec:
    """A policy whose trials take about a second."""
    values = {
        "objective": {"minimize": "ttft"},
        "slo": {"ttft": {"p95": "2s"}, "errorRate": "1%"},
        "search": {
            "space": {"quantization": ["bf16", "int8", "int4"], "max_num_seqs": {"low": 4, "high": 32, "log": True}},
            "budget": {"trials": 7, "duration": "10m"},
            "trial": {"warmup": "0s", "duration": "300ms"},
            "confirm": {"finalists": 1, "rounds": 2, "duration": "300ms"},
        },
        "workload": {
            "from": "synthetic",
            "rate": "30/s",
            "promptTokens": {"median": 8, "max": 16},
            "outputTokens": {"median": 3, "max": 6},
        },
        "rollout": {"steps": [{"weight": 25, "detect": "50%"}, {"weight": 100}]},
        "share": True,
    }
    return PolicySpec.model_validate(values | changes)


def _plan(folder: Path, policy_changes: dict[str, object], **changes: object) -> ExperimentPlan:
    adapter = EmbeddedAdapter()
    made = ExperimentPlan(
        name="fake",
        policy=policy(**policy_changes),
        adapter=adapter,
        incumbent=adapter.catalogue.configuration({"quantization": "fp32", "max_num_seqs": 1}),
        workload=SyntheticWorkload(
            30.0, Arrivals("constant"), LogNormalTokens(8, 0.2, 16), LogNormalTokens(3, 0.2, 6), 1
        ),
        model=ModelFacts("fake", "digest", 1000, 1000),
        devices=Devices((), (), 2**32, shared="engine and client share every core"),
        folder=folder / "experiment",
        quality_folder=folder / "quality",
        limits=Limits(max_client_lag_s=1.0, drain_s=3.0, quality_pieces=1),
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


@pytest.fixture
def make_plan(tmp_path: Path) -> MakePlan:
    """Call it with fields of the plan to change, and ``spec`` for sections of the policy."""

    def make(spec: dict[str, object] | None = None, **changes: object) -> ExperimentPlan:
        return _plan(tmp_path, spec or {}, **changes)

    return make
