"""Labelled fault injection: a real engine that is really slow, to show that a canary catches it.

Off unless the command line asks for it; then it is in the log as a warning, in ``trimtab_engine_info`` and in
``/admin/knobs``.
"""

from __future__ import annotations

from dataclasses import dataclass

ACCEPTED = "slow_decode=FACTOR (decode steps take FACTOR times as long; 1 to 100)"


@dataclass(frozen=True, slots=True)
class Injection:
    """``slow_decode_ratio`` multiplies the duration of every step that decodes; 1 is the honest engine."""

    label: str
    slow_decode_ratio: float

    @classmethod
    def parse(cls, text: str) -> Injection:
        """Reads ``slow_decode=3``. Raises ``ValueError`` that says what is accepted."""
        name, _, value = text.partition("=")
        try:
            ratio = float(value)
        except ValueError:
            ratio = 0.0
        if name != "slow_decode" or not 1.0 <= ratio <= 100.0:
            raise ValueError(f"cannot inject {text!r}; accepted: {ACCEPTED}")
        return cls(text, ratio)

    def extra_s(self, step_s: float) -> float:
        """How much longer a decode step that took ``step_s`` must take."""
        return (self.slow_decode_ratio - 1.0) * step_s
