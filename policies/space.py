"""The search space: what a policy lets vary of an engine's knobs, with conditions. Knows no sampler.

A study walks ``SearchSpace.suggest`` with a chooser of its own (Optuna's ``suggest_*``), so conditional knobs are
asked for only where their condition holds; where it does not, they take the base's value, and no two trials differ
in a knob that has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from trimtab.engine.contract import (
    ChangeCost,
    ChoiceKnob,
    Configuration,
    FloatKnob,
    IntKnob,
    KnobCatalogue,
    KnobValue,
)
from trimtab.errors import KnobError
from trimtab.policies.manifest import ChoiceSpace, KnobSpace

# Their effect depends on what the text says: random or borrowed prompts accept no drafts.
CONTENT_DEPENDENT = frozenset({"speculative_method", "speculative_k", "speculative_adaptive", "prefix_cache"})


class Chooser(Protocol):
    """Chooses one value of one knob."""

    def suggest_int(self, name: str, low: int, high: int, *, log: bool = False) -> int: ...

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float: ...

    def suggest_categorical(self, name: str, choices: tuple[KnobValue, ...]) -> KnobValue: ...


@dataclass(frozen=True, slots=True)
class RangeDimension:
    """A numeric knob between two bounds. ``when`` maps other knobs to the values under which it matters."""

    name: str
    low: float
    high: float
    log: bool
    whole: bool
    when: tuple[tuple[str, tuple[KnobValue, ...]], ...]

    def choose(self, chooser: Chooser) -> KnobValue:
        if self.whole:
            return chooser.suggest_int(self.name, int(self.low), int(self.high), log=self.log)
        return chooser.suggest_float(self.name, self.low, self.high, log=self.log)

    def contains(self, value: KnobValue) -> bool:
        return isinstance(value, int | float) and self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class ChoiceDimension:
    """A knob with a few values to try."""

    name: str
    choices: tuple[KnobValue, ...]
    when: tuple[tuple[str, tuple[KnobValue, ...]], ...]

    def choose(self, chooser: Chooser) -> KnobValue:
        return chooser.suggest_categorical(self.name, self.choices)

    def contains(self, value: KnobValue) -> bool:
        return value in self.choices


Dimension = RangeDimension | ChoiceDimension


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Dimensions in an order in which every condition comes before what depends on it.

    ``left_out`` maps each knob that the policy lists and this search does not vary to the reason.
    """

    catalogue: KnobCatalogue
    base: Configuration
    dimensions: tuple[Dimension, ...]
    left_out: Mapping[str, str]

    def suggest(self, chooser: Chooser) -> Configuration:
        """Asks ``chooser`` for every knob that is active. An ordered pair the wrong way round is mended by lowering
        the first knob to the second."""
        values: dict[str, KnobValue] = dict(self.base)
        for dimension in self.dimensions:
            if _is_active(dimension, values):
                values[dimension.name] = dimension.choose(chooser)
        return self.canonical(values)

    def canonical(self, values: Mapping[str, KnobValue]) -> Configuration:
        """The configuration that equals ``values`` in effect: inactive knobs take the base's value."""
        filled: dict[str, KnobValue] = dict(self.base) | dict(values)
        for dimension in self.dimensions:
            if not _is_active(dimension, filled):
                filled[dimension.name] = self.base[dimension.name]
        for low, high in self.catalogue.ordered:
            filled[low] = min(filled[low], filled[high])
        return self.catalogue.configuration(filled)

    def parameters(self, configuration: Configuration) -> dict[str, KnobValue] | None:
        """What a sampler would have chosen to get ``configuration``; ``None`` when it lies outside the space."""
        varied = {d.name for d in self.dimensions}
        if any(configuration[n] != self.base[n] for n in configuration if n not in varied):
            return None
        active = [d for d in self.dimensions if _is_active(d, configuration)]
        if not all(d.contains(configuration[d.name]) for d in active):
            return None
        return {d.name: configuration[d.name] for d in active}

    def names_with_cost(self, *costs: ChangeCost) -> tuple[str, ...]:
        """The varied knobs whose change costs one of ``costs``."""
        return tuple(d.name for d in self.dimensions if self.catalogue[d.name].change_cost in costs)


def build_space(
    space: Mapping[str, KnobSpace], catalogue: KnobCatalogue, base: Configuration, *, content_known: bool
) -> SearchSpace:
    """Checks a policy's space against the engine's catalogue.

    Args:
        base: gives the value of every knob that is not searched or not active.
        content_known: whether prompts are real or supplied by the policy; if not, knobs whose effect depends on
            content are left out.

    Raises:
        KnobError: an unknown knob, a range or value that the engine does not take, or a circular condition.
    """
    left_out: dict[str, str] = {}
    kept: dict[str, Dimension] = {}
    for name, part in space.items():
        dimension = _dimension(name, part, catalogue)
        if name in CONTENT_DEPENDENT and not content_known:
            left_out[name] = "its effect depends on content, and the prompts are not the users'; tune it live"
        else:
            kept[name] = dimension
    return SearchSpace(catalogue, base, _in_order(kept), left_out)


def _dimension(name: str, part: KnobSpace, catalogue: KnobCatalogue) -> Dimension:
    knob = catalogue[name]
    when = tuple((other, tuple(catalogue[other].check(v) for v in vs)) for other, vs in (part.when or {}).items())
    if isinstance(part, ChoiceSpace):
        return ChoiceDimension(name, tuple(knob.check(value) for value in part.choices), when)
    if isinstance(knob, ChoiceKnob):
        raise KnobError(f"{name}: a range was given, and it has named values; {knob.accepted()}")
    assert isinstance(knob, IntKnob | FloatKnob)
    low, high = knob.check(part.low), knob.check(part.high)
    return RangeDimension(name, low, high, part.log, isinstance(knob, IntKnob), when)


def _is_active(dimension: Dimension, values: Mapping[str, KnobValue]) -> bool:
    return all(values[other] in accepted for other, accepted in dimension.when)


def _in_order(kept: Mapping[str, Dimension]) -> tuple[Dimension, ...]:
    """Conditions first; otherwise as the policy lists them."""
    ordered: dict[str, Dimension] = {}
    waiting = dict(kept)
    while waiting:
        free = [n for n, d in waiting.items() if not any(other in waiting for other, _ in d.when)]
        if not free:
            raise KnobError(f"the conditions of {', '.join(waiting)} are circular")
        for name in free:
            ordered[name] = waiting.pop(name)
    return tuple(ordered.values())
