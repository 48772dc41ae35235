"""One step's plan: who takes part with how many tokens, and what had to happen for it. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field

from trimtab.engine.embedded.scheduling.sequence import Sequence

# Rows of prompt logits in one step: 256 rows of a vocabulary of 49,152 are 50 MB in float32.
MAX_SCORED_TOKENS = 256


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """A sequence's part in one step: its next ``num_tokens`` pending tokens, then its drafts."""

    sequence: Sequence
    num_tokens: int
    drafts: list[int] = field(default_factory=list)

    @property
    def completes(self) -> bool:
        """Whether nothing is pending after this step, so that a token can be sampled."""
        return self.num_tokens == self.sequence.num_pending_tokens

    @property
    def num_rows(self) -> int:
        return self.num_tokens + len(self.drafts)

    @property
    def num_pairs(self) -> int:
        """Its rows times the tokens that they attend to: what its attention costs."""
        return self.num_rows * (self.sequence.num_computed_tokens + self.num_rows)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A waiting sequence that is not going to be served, and why."""

    sequence: Sequence
    reason: str


@dataclass(slots=True, eq=False)
class StepPlan:
    """What the scheduler decided for one step."""

    budget_left_tokens: int
    prefill_left_tokens: int
    scored_left_tokens: int = MAX_SCORED_TOKENS
    entries: list[ScheduledSequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    recomputed: list[Sequence] = field(default_factory=list)  # preempted, to be computed again
    swapped: list[Sequence] = field(default_factory=list)  # preempted, their blocks swapped out
    refused: list[Refusal] = field(default_factory=list)
    num_compressed_blocks: int = 0

    @property
    def preempted(self) -> list[Sequence]:
        return self.recomputed + self.swapped

    @property
    def num_rows(self) -> int:
        return sum(entry.num_rows for entry in self.entries)

    @property
    def num_pairs(self) -> int:
        return sum(entry.num_pairs for entry in self.entries)
