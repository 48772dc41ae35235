"""How many drafts pay: so many as bring the most tokens a second, by what was accepted and what a step's rows cost.

A draft is worth the probability that it and all before it are accepted; a row costs what the step-time model says.
Sequences whose drafts are accepted get them, others do not, and with many sequences in a step rows cost more, so
drafts get fewer, down to none. Where none pays, one sequence is tried now and then, less and less often. Where some
pay, a step now and then goes without, and so does the first of a new size: what drafts are weighed against is known
from steps that were, and from those of the same minute.

The idea of choosing the length by expected goodput is from SmartSpec (Liu et al., 2024, arXiv:2406.14066); the core
calls this once a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.engine.embedded.scheduling.step_time import StepTimeModel

# Expected tokens a second must rise by this much before drafts are started, and by the smaller one to go on.
_START_GAIN = 1.08
_KEEP_GAIN = 1.03
_WEIGHT = 0.15  # of a new verification in a sequence's acceptance
_SHARED_WEIGHT = 0.02  # and in what is expected of a new sequence
_FIRST_PROBE_STEPS = 16
_LAST_PROBE_STEPS = 512
_PLAIN_EVERY_STEPS = 32


@dataclass(slots=True, eq=False)
class Acceptance:
    """The probability that one more draft of a sequence is accepted, given that those before it were."""

    ratio: float

    def observe(self, num_drafts: int, num_accepted: int, weight: float = _WEIGHT) -> None:
        """Takes one verification: up to the first rejected draft each was a trial."""
        for index in range(min(num_accepted + 1, num_drafts)):
            self.ratio += weight * ((index < num_accepted) - self.ratio)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One sequence's part in the step, and how many drafts it has."""

    acceptance: Acceptance
    num_drafts: int


class AdaptiveDrafting:
    """Chooses the numbers of drafts of one engine's steps."""

    def __init__(self, step_time: StepTimeModel) -> None:
        self._step_time = step_time
        self._shared = Acceptance(0.5)
        self._drafting = False
        self._steps_since_plain = 0
        self._steps_since_probe = 0
        self._probe_after = _FIRST_PROBE_STEPS

    def new_sequence(self) -> Acceptance:
        """What is expected of a sequence that has verified nothing yet."""
        return Acceptance(self._shared.ratio)

    def choose(self, candidates: Sequence[Candidate], num_rows: int, num_pairs: int) -> list[int]:
        """How many of its drafts each candidate gets.

        Args:
            candidates: The step's sequences that have drafts.
            num_rows: The step's rows without drafts.
            num_pairs: Its attended pairs without drafts.
        """
        chosen = self._most_tokens_a_second(candidates, num_rows, num_pairs)
        self._drafting = any(chosen)
        if not self._drafting:
            self._steps_since_plain = 0
            return self._probe(candidates)
        self._steps_since_plain += 1
        if self._steps_since_plain >= _PLAIN_EVERY_STEPS or not self._step_time.has_seen(num_rows):
            self._steps_since_plain = 0
            return [0] * len(candidates)
        return chosen

    def observe(self, acceptance: Acceptance, num_drafts: int, num_accepted: int) -> None:
        """Takes what came of one sequence's drafts."""
        acceptance.observe(num_drafts, num_accepted)
        self._shared.observe(num_drafts, num_accepted, _SHARED_WEIGHT)
        if num_accepted == num_drafts:
            self._probe_after = _FIRST_PROBE_STEPS

    def _most_tokens_a_second(self, candidates: Sequence[Candidate], num_rows: int, num_pairs: int) -> list[int]:
        chosen = [0] * len(candidates)
        plain_s = self._step_time.predict(num_rows, num_pairs)
        if plain_s is None or not candidates:
            return chosen
        worth = sorted(
            (
                (candidate.acceptance.ratio**position, index)
                for index, candidate in enumerate(candidates)
                for position in range(1, candidate.num_drafts + 1)
            ),
            reverse=True,
        )
        # Each sequence that samples brings one token without drafts; those without drafts gain nothing either way,
        # but wait for the longer step with the others.
        tokens = float(num_rows)
        best_rate, best_number = tokens / plain_s * (_KEEP_GAIN if self._drafting else _START_GAIN), 0
        pairs_a_row = num_pairs / num_rows
        for number, (probability, _) in enumerate(worth, start=1):
            tokens += probability
            step_s = self._step_time.predict(num_rows + number, round(num_pairs + number * pairs_a_row))
            assert step_s is not None
            if tokens / step_s > best_rate:
                best_rate, best_number = tokens / step_s, number
        for _, index in worth[:best_number]:
            chosen[index] += 1
        return chosen

    def _probe(self, candidates: Sequence[Candidate]) -> list[int]:
        """Nothing, or the first drafts of the most promising sequence when it is time to try again."""
        chosen = [0] * len(candidates)
        self._steps_since_probe += 1
        if candidates and self._steps_since_probe >= self._probe_after:
            self._steps_since_probe = 0
            self._probe_after = min(2 * self._probe_after, _LAST_PROBE_STEPS)
            best = max(range(len(candidates)), key=lambda i: candidates[i].acceptance.ratio)
            chosen[best] = min(2, candidates[best].num_drafts)
        return chosen
