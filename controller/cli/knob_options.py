"""Reads ``--set KNOB=VALUE`` into typed values; the engine's catalogue checks them later."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trimtab.engine.contract import KnobValue
from trimtab.errors import KnobError


def parse_knobs(pairs: Sequence[str]) -> dict[str, KnobValue]:
    """``["max_num_seqs=8"]`` → ``{"max_num_seqs": 8}``. Raises ``KnobError`` for a pair without a ``=``."""
    knobs: dict[str, KnobValue] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name or not text:
            raise KnobError(f"--set {pair!r}: accepted: KNOB=VALUE, such as max_num_seqs=8")
        knobs[name] = _typed(text)
    return knobs


def _typed(text: str) -> KnobValue:
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        return value if math.isfinite(value) else text
    return text
