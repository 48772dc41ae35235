"""Knobs take what they say and refuse everything else with ``KnobError``."""

from __future__ import annotations

import math

import pytest

from trimtab.engine.contract import ChangeCost, FloatKnob, IntKnob
from trimtab.errors import KnobError

COUNT = IntKnob("count", 1, 64, 8, "sequences", ChangeCost.LIVE, "A count.")
SHARE = FloatKnob("share", 0.0, 1.0, 0.5, "ratio", ChangeCost.LIVE, "A share.")


@pytest.mark.parametrize("knob", [COUNT, SHARE])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 10**400, -(10**400), 1e300, True, "8", None, [8]])
def test_what_is_no_number_in_range_is_refused(knob: IntKnob | FloatKnob, value: object) -> None:
    with pytest.raises(KnobError, match="accepted:"):
        knob.check(value)  # type: ignore[arg-type]


def test_a_count_may_be_written_as_a_real_number_but_has_no_fraction() -> None:
    assert COUNT.check(8.0) == 8
    with pytest.raises(KnobError, match="not a whole number"):
        COUNT.check(8.5)
