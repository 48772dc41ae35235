"""What every room may know about an engine: knob types, catalogues, metric names, records. Data only.

Adapters fill these types, policies search over them, experiments and the controller read them. Nothing here
does I/O, and nothing here imports an engine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from trimtab.errors import KnobError

KnobValue = str | int | float | bool


class ChangeCost(StrEnum):
    """What it takes to change a knob on a running engine, cheapest first."""

    LIVE = "live"  # at a step boundary, nothing dropped
    RESTART = "restart"  # a new process
    REQUANTIZE = "requantize"  # a new process whose weights are converted again


@dataclass(frozen=True, slots=True)
class IntKnob:
    """A whole-number setting in ``[low, high]``; ``log`` says that its effect is multiplicative."""

    name: str
    low: int
    high: int
    default: int
    unit: str
    change_cost: ChangeCost
    doc: str
    log: bool = False

    def check(self, value: KnobValue) -> int:
        """Returns ``value`` as this knob's type. Raises ``KnobError`` outside the range."""
        if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0:
            raise KnobError(f"{self.name}: {value!r} is not a whole number of {self.unit}; {self.accepted()}")
        if not self.low <= value <= self.high:
            raise KnobError(f"{self.name}: {value!r} is out of range; {self.accepted()}")
        return int(value)

    def accepted(self) -> str:
        return f"accepted: whole numbers from {self.low} to {self.high} ({self.unit})"


@dataclass(frozen=True, slots=True)
class FloatKnob:
    """A real setting in ``[low, high]``."""

    name: str
    low: float
    high: float
    default: float
    unit: str
    change_cost: ChangeCost
    doc: str
    log: bool = False

    def check(self, value: KnobValue) -> float:
        """Returns ``value`` as this knob's type. Raises ``KnobError`` outside the range or for NaN."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise KnobError(f"{self.name}: {value!r} is not a number; {self.accepted()}")
        if not self.low <= value <= self.high:
            raise KnobError(f"{self.name}: {value!r} is out of range; {self.accepted()}")
        return float(value)

    def accepted(self) -> str:
        return f"accepted: numbers from {self.low:g} to {self.high:g} ({self.unit})"


@dataclass(frozen=True, slots=True)
class ChoiceKnob:
    """A setting that is one of a few named values."""

    name: str
    choices: tuple[str, ...]
    default: str
    change_cost: ChangeCost
    doc: str

    def check(self, value: KnobValue) -> str:
        """Returns ``value``. Raises ``KnobError`` when it is not one of the choices."""
        if not isinstance(value, str) or value not in self.choices:
            bare = {False: "off", True: "on"}.get(value) if isinstance(value, bool) else None
            hint = f" (YAML reads a bare {bare} as {str(value).lower()}: quote it)" if bare in self.choices else ""
            raise KnobError(f"{self.name}: {value!r} is not a choice{hint}; {self.accepted()}")
        return value

    def accepted(self) -> str:
        return f"accepted: {', '.join(self.choices)}"


Knob = IntKnob | FloatKnob | ChoiceKnob


@dataclass(frozen=True, slots=True)
class Configuration(Mapping[str, KnobValue]):
    """A full assignment of one engine's knobs. Equal assignments are equal configurations.

    Build it with ``KnobCatalogue.configuration``; read it like a mapping.
    """

    items_: tuple[tuple[str, KnobValue], ...]

    def __getitem__(self, name: str) -> KnobValue:
        for key, value in self.items_:
            if key == name:
                return value
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (key for key, _ in self.items_)

    def __len__(self) -> int:
        return len(self.items_)

    @property
    def canonical_json(self) -> str:
        """Keys sorted, no spaces: the text that ``id`` hashes."""
        return json.dumps(dict(self.items_), sort_keys=True, separators=(",", ":"))

    @property
    def id(self) -> str:
        """The first 12 hex digits of the SHA-256 of ``canonical_json``."""
        return hashlib.sha256(self.canonical_json.encode()).hexdigest()[:12]

    def changed(self, other: Configuration) -> dict[str, tuple[KnobValue | None, KnobValue | None]]:
        """Maps each knob that differs to ``(self's value, other's value)``."""
        names = sorted({*self, *other})
        return {n: (self.get(n), other.get(n)) for n in names if self.get(n) != other.get(n)}


@dataclass(frozen=True, slots=True)
class KnobCatalogue:
    """All knobs of one engine, in the order a person reads them.

    ``ordered`` lists pairs of knobs of which the first must not exceed the second.
    """

    engine: str
    knobs: tuple[Knob, ...]
    ordered: tuple[tuple[str, str], ...] = ()

    def __getitem__(self, name: str) -> Knob:
        for knob in self.knobs:
            if knob.name == name:
                return knob
        raise KnobError(f"{name!r} is not a knob of engine {self.engine!r}; accepted: {', '.join(self.names)}")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(k.name for k in self.knobs)

    def default(self) -> Configuration:
        return self.configuration({})

    def configuration(self, values: Mapping[str, KnobValue], *, base: Configuration | None = None) -> Configuration:
        """Fills ``values`` up from ``base`` (or the defaults) to a full, checked configuration.

        Raises:
            KnobError: a knob is unknown, a value is not accepted, or an ordered pair is the wrong way round.
        """
        for name in values:
            self[name]
        filled = {k.name: k.default for k in self.knobs} | dict(base or {}) | dict(values)
        checked = {k.name: k.check(filled[k.name]) for k in self.knobs}
        for low, high in self.ordered:
            if checked[low] > checked[high]:  # type: ignore[operator]
                raise KnobError(f"{low} ({checked[low]}) must not exceed {high} ({checked[high]})")
        return Configuration(tuple(checked.items()))

    def change_cost(self, old: Configuration, new: Configuration) -> ChangeCost | None:
        """The dearest cost among the knobs that differ; ``None`` when nothing differs."""
        costs = {self[name].change_cost for name in old.changed(new)}
        order = list(ChangeCost)
        return max(costs, key=order.index) if costs else None


class RequestOutcome(StrEnum):
    """How a request to the engine ended."""

    SUCCEEDED = "succeeded"
    REFUSED = "refused"  # 429 or 503: the engine said "not now"
    CANCELLED = "cancelled"  # the client went away
    FAILED = "failed"  # the engine's fault


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One finished request as the engine saw it (``GET /admin/records``). Times are seconds.

    ``sequence`` is the cursor: it grows by one a record within one engine process.
    ``None`` where the figure does not exist (no token was produced, or only one).
    """

    sequence: int
    request_id: str
    arrival_unix_s: float
    finished_unix_s: float
    outcome: RequestOutcome
    prompt_tokens: int
    output_tokens: int
    queue_s: float | None
    ttft_s: float | None
    tpot_s: float | None  # (duration − TTFT) / (output_tokens − 1)
    max_itl_s: float | None
    duration_s: float
    mean_batch_size: float | None  # running sequences, averaged over the request's decode steps
    mean_step_s: float | None  # duration of the request's decode steps, averaged


@dataclass(frozen=True, slots=True)
class EngineEndpoint:
    """Where one running engine is reached. ``admin_url`` and its token are never given to users."""

    base_url: str
    admin_url: str | None
    admin_token: str | None
    model: str


@dataclass(frozen=True, slots=True)
class MetricNames:
    """The Prometheus names under which one engine exports the canonical figures; ``None``: it does not."""

    ttft_s: str | None  # histogram
    tpot_s: str | None  # histogram
    itl_s: str | None  # histogram
    duration_s: str | None  # histogram
    queue_s: str | None  # histogram
    running: str | None  # gauge
    waiting: str | None  # gauge
    kv_usage_ratio: str | None  # gauge
    prefix_lookup_tokens: str | None  # counter
    prefix_hit_tokens: str | None  # counter
    preemptions: str | None  # counter
    prompt_tokens: str | None  # counter
    output_tokens: str | None  # counter
    requests: str | None  # counter with an ``outcome`` label
    draft_tokens: str | None  # counter
    accepted_tokens: str | None  # counter
    step_s: str | None  # histogram
