"""What was measured, as policies read it: the figures of one load, of quality, and of a whole trial.

Experiments fill these types; ``objective``, ``constraints`` and ``promotion`` judge them. ``None`` always means "was
not measured", which no policy takes as good.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Percentiles:
    """A distribution's summary. The unit is the figure's own."""

    mean: float
    p50: float
    p95: float
    p99: float
    num_values: int

    def at(self, percent: int) -> float:
        """The percentile ``percent``: 50, 95 or 99."""
        return {50: self.p50, 95: self.p95, 99: self.p99}[percent]


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """One open-loop load. Latencies are seconds, counted from the intended arrival."""

    rate_per_s: float  # intended mean rate
    num_sent: int
    num_succeeded: int
    num_refused: int
    num_failed: int
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None  # None too when no answer had two tokens
    itl_s: Percentiles | None
    e2e_s: Percentiles | None
    output_tokens_per_s: float
    requests_per_s: float
    oversaturated: bool  # concurrency and TTFT both kept rising

    @property
    def error_ratio(self) -> float | None:
        """Refused and failed requests over those sent; ``None`` when none was sent."""
        return (self.num_refused + self.num_failed) / self.num_sent if self.num_sent else None


@dataclass(frozen=True, slots=True)
class QualityFigures:
    """How far the answers moved from the reference (the file's own weights, dequantized)."""

    kl_nats: float  # mean over tokens of KL(reference || candidate); a lower bound
    perplexity: float
    reference_perplexity: float
    num_tokens: int

    @property
    def perplexity_increase_ratio(self) -> float:
        return self.perplexity / self.reference_perplexity - 1


@dataclass(frozen=True, slots=True)
class TrialFigures:
    """One trial.

    ``load`` is the load at the recorded rate. ``goodput_per_s`` lies between the last step of the staircase that held
    and the first that broke; it is 0 when none held, ``None`` when no staircase was climbed.
    """

    load: LoadFigures
    goodput_per_s: float | None
    quality: QualityFigures | None
    stairs: tuple[LoadFigures, ...] = ()
