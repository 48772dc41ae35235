"""What one experiment is about to do, and what that costs. ``tune --plan`` prints the estimate; nothing runs here."""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass
from pathlib import Path

import trimtab
from trimtab.engine.adapters.interface import EngineAdapter
from trimtab.engine.contract import ChangeCost, Configuration
from trimtab.errors import ExperimentError
from trimtab.experiments.memory import ModelFacts
from trimtab.experiments.quality import ReferenceKey
from trimtab.experiments.workload.interface import Workload
from trimtab.policies.manifest import ObjectiveMetric, PolicySpec
from trimtab.policies.space import ChoiceDimension, SearchSpace, build_space

STAIR_RATIOS = (1.0, 1.5, 2.25, 3.4, 5.0)
MIN_STEP_REQUESTS = 4  # a step lasts at least until so many have arrived
_START_ESTIMATE_S = 6.0
_QUALITY_ESTIMATE_S = 10.0
# What a load takes in terms of its duration, its stragglers included; a staircase waits for them after each step.
_STAIRS, _LOAD = 2.0, 1.1


@dataclass(frozen=True, slots=True)
class Devices:
    """Who runs where. ``shared`` is a sentence on what engine and client share; ``None``: nothing.

    Empty sets of CPUs mean any.
    """

    engine_cpus: tuple[int, ...]
    client_cpus: tuple[int, ...]
    memory_bytes: int  # for one engine
    shared: str | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What makes a measurement void, and how long stragglers are waited for."""

    max_client_lag_s: float = 0.1
    drain_s: float = 10.0
    quality_pieces: int = 4  # of about 500 tokens
    # Of the workload's rate, rising from 1, at most five. Each step ends with its longest answer: fewer are quicker.
    stair_ratios: tuple[float, ...] = STAIR_RATIOS
    confirms_default: bool = True  # measure the default beside the finalists, for the report's intervals


@dataclass(frozen=True, slots=True)
class ExperimentPlan:
    """Everything that decides an experiment. ``folder`` keeps its study, so a run with the same folder resumes."""

    name: str
    policy: PolicySpec
    adapter: EngineAdapter
    incumbent: Configuration
    workload: Workload
    model: ModelFacts
    devices: Devices
    folder: Path
    quality_folder: Path  # stored references, shared by experiments
    seed: int = 1
    limits: Limits = Limits()

    @property
    def space(self) -> SearchSpace:
        """Raises ``KnobError`` when the policy's space does not suit the engine."""
        return build_space(
            self.policy.search.space,
            self.adapter.catalogue,
            self.incumbent,
            content_known=self.workload.content_known,
        )

    @property
    def reference(self) -> Configuration:
        """The incumbent's knobs with the file's own weights, dequantized."""
        return self.adapter.catalogue.configuration({"quantization": "fp32"}, base=self.incumbent)

    @property
    def reference_key(self) -> ReferenceKey:
        return ReferenceKey(self.model.digest, trimtab.__version__, hardware(), self.limits.quality_pieces)

    @property
    def climbs_stairs(self) -> bool:
        return self.policy.objective.metric is ObjectiveMetric.GOODPUT

    def refuse_silent_sharing(self) -> None:
        """Raises ``ExperimentError`` when cores are shared and the policy does not say that they may be."""
        if self.devices.shared is not None and not self.policy.share:
            raise ExperimentError(
                f"{self.devices.shared}, and the policy does not allow it; "
                "set share: true, or give the machine more cores"
            )

    def quality_knobs(self, configuration: Configuration) -> tuple[tuple[str, object], ...]:
        """The knobs that decide the answers' quality: those whose change converts the weights again."""
        catalogue = self.adapter.catalogue
        return tuple(
            (k.name, configuration[k.name]) for k in catalogue.knobs if k.change_cost is ChangeCost.REQUANTIZE
        )


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a plan costs: trials and confirmations at most, and about how long. A duration budget caps the search."""

    num_trials: int
    num_confirm_runs: int
    search_minutes: float
    confirm_minutes: float
    engine_cpus: tuple[int, ...]
    client_cpus: tuple[int, ...]
    shared: str | None
    searched_knobs: tuple[str, ...]
    left_out: dict[str, str]


def estimate(plan: ExperimentPlan) -> Estimate:
    """Says what the experiment will take. Raises ``KnobError`` like ``ExperimentPlan.space``."""
    search, space = plan.policy.search, plan.space
    load_s = search.trial.warmup + search.trial.duration * (_STAIRS if plan.climbs_stairs else _LOAD)
    num_quality = math.prod(len(d.choices) for d in space.dimensions if isinstance(d, ChoiceDimension)) + 1
    search_s = search.budget.trials * (_START_ESTIMATE_S + load_s) + num_quality * _QUALITY_ESTIMATE_S
    num_runs = (search.confirm.finalists + 1 + plan.limits.confirms_default) * search.confirm.rounds
    confirm_load_s = search.trial.warmup + search.confirm.duration * (_STAIRS if plan.climbs_stairs else _LOAD)
    return Estimate(
        num_trials=search.budget.trials,
        num_confirm_runs=num_runs,
        search_minutes=min(search_s, search.budget.duration) / 60,
        confirm_minutes=num_runs * (_START_ESTIMATE_S + confirm_load_s) / 60,
        engine_cpus=plan.devices.engine_cpus,
        client_cpus=plan.devices.client_cpus,
        shared=plan.devices.shared,
        searched_knobs=tuple(d.name for d in space.dimensions),
        left_out=dict(space.left_out),
    )


def hardware() -> str:
    """What figures and gates belong to: the machine's architecture and CPU model."""
    return f"{platform.machine()} {_cpu_model()}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
