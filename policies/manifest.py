"""The manifests' only definition: ``TuningPolicy`` and ``TunedEngine`` as pydantic models.

The JSON Schema and the reference page are generated from these models. Values that the design names and Trimtab
does not have yet are refused by name with what is accepted. ``policies.yaml_source`` reads the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal

from croniter import croniter
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
    TypeAdapter,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema

from trimtab.policies.units import Bytes, Rate, Seconds, Share

API_VERSION = "trimtab.dev/v1alpha1"

KnobValue = str | int | float | bool
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]


class Strict(BaseModel):
    """Unknown keys are errors, and a manifest does not change once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False)


class Metadata(Strict):
    name: Name = Field(description="The manifest's name, unique among its kind.")


class ObjectiveMetric(StrEnum):
    GOODPUT = "goodput"
    THROUGHPUT = "throughput"
    TTFT = "ttft"
    TPOT = "tpot"


_NOT_BUILT_OBJECTIVES = ("tokens_per_dollar", "cost_per_million_tokens")


class Objective(Strict):
    """Exactly one of the two."""

    maximize: Literal["goodput", "throughput"] | None = Field(None, description="The figure to raise.")
    minimize: Literal["ttft", "tpot"] | None = Field(None, description="The figure to lower.")

    @field_validator("maximize", "minimize", mode="before")
    @classmethod
    def _is_built(cls, value: Any) -> Any:
        if value in _NOT_BUILT_OBJECTIVES:
            raise ValueError(
                f"{value!r} is not built yet; accepted: maximize goodput or throughput, minimize ttft or tpot"
            )
        return value

    @model_validator(mode="after")
    def _is_one(self) -> Objective:
        if (self.maximize is None) == (self.minimize is None):
            raise ValueError("give exactly one of maximize and minimize")
        return self

    @property
    def metric(self) -> ObjectiveMetric:
        return ObjectiveMetric(self.maximize or self.minimize or "")

    @property
    def larger_is_better(self) -> bool:
        return self.maximize is not None


class LatencySLO(Strict):
    """Bounds on percentiles; at least one."""

    p50: Seconds | None = Field(None, description="Bound on the median; None: none.")
    p95: Seconds | None = Field(None, description="Bound on the 95th percentile; None: none.")
    p99: Seconds | None = Field(None, description="Bound on the 99th percentile; None: none.")

    @model_validator(mode="after")
    def _is_some(self) -> LatencySLO:
        if not self.bounds():
            raise ValueError("give at least one of p50, p95 and p99")
        return self

    def bounds(self) -> dict[int, float]:
        """Maps percentile → seconds."""
        pairs = ((50, self.p50), (95, self.p95), (99, self.p99))
        return {percent: bound for percent, bound in pairs if bound is not None}


class SLO(Strict):
    ttft: LatencySLO | None = Field(None, description="Time to first token.")
    tpot: LatencySLO | None = Field(None, description="Time per output token after the first.")
    errorRate: Share = Field(0.001, description="The largest share of requests that may fail or be refused.")


class Quality(Strict):
    """How far a configuration may move the model's answers from the file's own weights."""

    maxKL: float = Field(0.02, gt=0, description="Mean KL divergence per token, in nats, at most.")
    maxPerplexityIncrease: Share = Field(0.01, description="Relative rise of perplexity, at most.")


class RangeSpace(Strict):
    """A range of a numeric knob."""

    low: float = Field(description="The smallest value to try.")
    high: float = Field(description="The largest value to try.")
    log: bool = Field(False, description="Whether to search it on a logarithmic scale.")
    when: Mapping[str, list[KnobValue]] | None = Field(
        None, description="Searched only when each named knob has one of these values; None: always."
    )

    @model_validator(mode="after")
    def _is_ordered(self) -> RangeSpace:
        if not self.low <= self.high:
            raise ValueError(f"low ({self.low:g}) must not exceed high ({self.high:g})")
        if self.log and self.low <= 0:
            raise ValueError(f"low ({self.low:g}) must be above 0 on a logarithmic scale")
        return self


class ChoiceSpace(Strict):
    """A few values of any knob."""

    choices: list[KnobValue] = Field(min_length=1, description="The values to try.")
    when: Mapping[str, list[KnobValue]] | None = Field(
        None, description="Searched only when each named knob has one of these values; None: always."
    )


def _space_kind(value: Any) -> str:
    if isinstance(value, ChoiceSpace) or (isinstance(value, Mapping) and "choices" in value):
        return "choices"
    return "range"


class _ListShorthand:
    """Lets the JSON Schema take a plain list, which ``Search`` reads as choices."""

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core)
        values = TypeAdapter(list[KnobValue]).json_schema()
        return {**schema, "oneOf": [*schema["oneOf"], {**values, "minItems": 1}]}


KnobSpace = Annotated[
    Annotated[RangeSpace, Tag("range")] | Annotated[ChoiceSpace, Tag("choices")],
    Discriminator(_space_kind),
    _ListShorthand(),
]


class Budget(Strict):
    trials: int = Field(20, ge=2, le=10_000, description="Trials at most, the default and the incumbent included.")
    duration: Seconds = Field(1800.0, gt=0, description="Search time at most; confirmation comes on top.")
    parallel: Literal[1] = Field(1, description="Trials at a time; only 1 is built.")


class TrialSettings(Strict):
    warmup: Seconds = Field(2.0, ge=0, description="Load before the measurement; its requests do not count.")
    duration: Seconds = Field(20.0, gt=0, description="Load that is measured, per trial.")
    stairs: list[float] = Field(
        default=[1.0, 1.5, 2.25, 3.4, 5.0],
        min_length=1,
        max_length=5,
        description="Goodput's rising steps, as multiples of the workload's rate; the first is 1.",
    )

    @field_validator("stairs")
    @classmethod
    def _rises_from_one(cls, value: list[float]) -> list[float]:
        if value[0] != 1 or value != sorted(set(value)):
            raise ValueError(f"{value} must rise from 1, such as [1, 2, 4]")
        return value


class Confirm(Strict):
    finalists: int = Field(2, ge=1, le=8, description="Configurations that are measured again.")
    rounds: int = Field(3, ge=2, le=50, description="Engine restarts per finalist, interleaved with the incumbent.")
    duration: Seconds = Field(20.0, gt=0, description="Load that is measured, per finalist and round.")
    default: bool = Field(True, description="Whether the engine's default is measured beside them, for the report.")


class Search(Strict):
    space: Mapping[str, KnobSpace] = Field(min_length=1, description="Which knobs to search, and where.")
    budget: Budget = Field(default_factory=Budget)
    trial: TrialSettings = Field(default_factory=TrialSettings)
    confirm: Confirm = Field(default_factory=Confirm)

    @field_validator("space", mode="before")
    @classmethod
    def _lists_are_choices(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {name: {"choices": s} if isinstance(s, list) else s for name, s in value.items()}


class LogNormal(Strict):
    """A log-normal number of tokens, clipped to ``max``."""

    median: int = Field(ge=1, description="Median, in tokens.")
    sigma: float = Field(0.6, ge=0, le=3, description="Standard deviation of the logarithm.")
    max: int = Field(le=1_000_000, description="Values above are clipped to this many tokens.")

    @model_validator(mode="after")
    def _is_ordered(self) -> LogNormal:
        if self.max < self.median:
            raise ValueError(f"max ({self.max}) must not be below median ({self.median})")
        return self


class Arrivals(Strict):
    process: Literal["poisson", "constant", "gamma"] = Field("poisson", description="Law of the gaps.")
    cv: float = Field(1.0, gt=0, le=20, description="Coefficient of variation of the gaps; read for gamma only.")


class SyntheticWorkload(Strict):
    from_: Literal["synthetic"] = Field(alias="from", description="Where the requests come from.")
    rate: Rate = Field(description="Mean rate of requests.")
    arrivals: Arrivals = Field(default_factory=Arrivals)
    promptTokens: LogNormal = Field(description="Lengths of prompts.")
    outputTokens: LogNormal = Field(description="Lengths of outputs.")
    prompts: Literal["none"] = Field("none", description="Synthetic prompts are cut from a public-domain text.")
    seed: int = Field(1, ge=0, description="The same seed gives the same requests.")


class TraceWorkload(Strict):
    from_: Literal["trace"] = Field(alias="from", description="Where the requests come from.")
    path: str = Field(description="A JSONL trace with prompts, relative to the manifest's folder.")
    rate: Rate | None = Field(None, description="Mean rate that the trace's clock is scaled to; None: as recorded.")


def _workload_kind(value: Any) -> str | None:
    kind = value.get("from", value.get("from_")) if isinstance(value, Mapping) else getattr(value, "from_", None)
    return kind if isinstance(kind, str) else None


Workload = Annotated[
    Annotated[SyntheticWorkload, Tag("synthetic")] | Annotated[TraceWorkload, Tag("trace")],
    Discriminator(
        _workload_kind,
        custom_error_type="workload_from",
        custom_error_message="from: accepted: synthetic, trace (live is not built yet)",
    ),
]


class Triggers(Strict):
    """What starts an experiment. A person always can."""

    schedule: str | None = Field(None, description="A cron line of five fields, UTC; None: no schedule.")
    cooldown: Seconds = Field(3600.0, ge=0, description="No scheduled experiment starts sooner after the last one.")

    @field_validator("schedule")
    @classmethod
    def _is_cron(cls, value: str | None) -> str | None:
        if value is not None and not (len(value.split()) == 5 and croniter.is_valid(value)):
            raise ValueError(f"{value!r} is not a cron line of five fields, such as '0 3 * * *'")
        return value


class RolloutStep(Strict):
    weight: int = Field(ge=1, le=100, description="The canary's share of requests, in percent.")
    detect: Share | None = Field(
        None, gt=0, description="Harm of this size must be ruled out before the step is left; None on the last step."
    )


class Margin(Strict):
    """Harm up to this size is tolerated."""

    ttft: Share = Field(0.1, description="Relative rise of the time to first token.")
    tpot: Share = Field(0.1, description="Relative rise of the time per output token.")
    errors: Share = Field(0.01, description="Rise of the share of requests that fail or are refused.")


class JudgeSettings(Strict):
    confidence: float = Field(0.99, gt=0.5, lt=1, description="Confidence of each decision over the whole rollout.")
    margin: Margin = Field(default_factory=Margin)
    window: Seconds = Field(30.0, gt=0, description="Length of the windows in which the arms are paired.")
    settle: Seconds = Field(30.0, ge=0, description="Time after a weight change that no comparison uses.")
    minRequests: int = Field(30, ge=1, description="Requests per arm and step before a check may pass or fail.")
    maxImbalance: Share = Field(
        0.1, description="Tokens per replica that differ by more make every check inconclusive."
    )
    maxDuration: Seconds = Field(86400.0, gt=0, description="A rollout that is undecided for longer ends.")
    onInconclusive: Literal["rollback", "pause"] = Field(
        "rollback", description="What happens when maxDuration has passed without a decision."
    )


class Rollout(Strict):
    steps: list[RolloutStep] = Field(
        min_length=1, description="At least two weights in rising order; the last is 100, where nothing is compared."
    )
    judge: JudgeSettings = Field(default_factory=JudgeSettings)
    approval: Literal["automatic", "manual"] = Field("automatic", description="Who lets a winner start its rollout.")

    @model_validator(mode="after")
    def _steps_rise(self) -> Rollout:
        weights = [s.weight for s in self.steps]
        if weights[-1] != 100 or weights != sorted(set(weights)):
            raise ValueError(f"weights {weights} must rise and end at 100")
        if len(weights) < 2:
            raise ValueError("a step of at most 50 must come before 100, or the canary is promoted uncompared")
        for step in self.steps[:-1]:
            if step.weight > 50:
                raise ValueError(
                    f"weight {step.weight}: a baseline of the same share runs beside; accepted: up to 50"
                )
            if step.detect is None:
                raise ValueError(f"the step of weight {step.weight} needs detect, such as 20%")
        return self


class PolicySpec(Strict):
    objective: Objective
    slo: SLO
    quality: Quality = Field(default_factory=Quality)
    search: Search
    workload: Workload
    triggers: Triggers = Field(default_factory=Triggers)
    rollout: Rollout
    share: bool = Field(
        False, description="Whether serving, trials and load client may share cores where there are too few."
    )


class TuningPolicy(Strict):
    """What is wanted and allowed."""

    apiVersion: Literal["trimtab.dev/v1alpha1"] = Field(description="The version of the manifests' form.")
    kind: Literal["TuningPolicy"] = Field(description="Which manifest this is.")
    metadata: Metadata
    spec: PolicySpec


class Resources(Strict):
    cpus: int = Field(1, ge=1, le=1024, description="CPU cores for each replica.")
    memory: Bytes = Field(4 * 1024**3, ge=256 * 1024**2, description="Memory for each replica, at most.")


class Prices(Strict):
    cpuHour: float = Field(0.0, ge=0, description="Price of one core for one hour, in the reader's currency.")


class EngineSpec(Strict):
    policy: Name = Field(description="The TuningPolicy's name.")
    engine: Literal["embedded"] = Field("embedded", description="The engine's adapter.")
    model: str = Field(description="A model's name, a GGUF file or a Hugging Face folder.")
    replicas: Literal[1] = Field(1, description="Replicas of the stable arm; only 1 is built.")
    port: int = Field(ge=1024, le=65535, description="Where users' requests arrive, on loopback.")
    resources: Resources = Field(default_factory=Resources)
    prices: Prices = Field(default_factory=Prices)
    configuration: Mapping[str, KnobValue] = Field(
        default_factory=dict,
        description="Knobs of the first stable configuration; the rest are the engine's defaults.",
    )


class TunedEngine(Strict):
    """The service that is tuned."""

    apiVersion: Literal["trimtab.dev/v1alpha1"] = Field(description="The version of the manifests' form.")
    kind: Literal["TunedEngine"] = Field(description="Which manifest this is.")
    metadata: Metadata
    spec: EngineSpec


Manifest = TuningPolicy | TunedEngine
KINDS: Mapping[str, type[TuningPolicy] | type[TunedEngine]] = {
    "TuningPolicy": TuningPolicy,
    "TunedEngine": TunedEngine,
}
