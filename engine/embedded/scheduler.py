"""The scheduler: which sequences take part in the next step, and with how many tokens.

Continuous batching (Yu et al., Orca, OSDI 2022) with chunked prefill (Agrawal et al., Sarathi-Serve, OSDI 2024): a
step has one token budget; decodes take theirs first, so that no prompt stalls them, then prompts in the order of
their admission, then new sequences in the order of their arrival. When a decode finds no free block, the sequence
that was admitted last gives all of its blocks back and is computed again later (preemption by recompute).

The core calls it between steps, from one thread. Pure Python; it never sees a tensor.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from trimtab.engine.contract import Configuration
from trimtab.engine.embedded.blocks import BlockAllocator
from trimtab.engine.embedded.sequence import Sequence
from trimtab.errors import RequestError

# Rows of prompt logits in one step: 256 rows of a vocabulary of 49,152 are 50 MB in float32.
MAX_SCORED_TOKENS = 256


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The live knobs of scheduling, as ``adapters.embedded.CATALOGUE`` defines them."""

    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk_tokens: int
    kv_high_watermark: float
    kv_low_watermark: float

    @classmethod
    def of(cls, configuration: Configuration) -> SchedulerLimits:
        return cls(
            max_num_seqs=int(configuration["max_num_seqs"]),
            max_num_batched_tokens=int(configuration["max_num_batched_tokens"]),
            prefill_chunk_tokens=int(configuration["prefill_chunk_tokens"]),
            kv_high_watermark=float(configuration["kv_high_watermark"]),
            kv_low_watermark=float(configuration["kv_low_watermark"]),
        )


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


@dataclass(slots=True, eq=False)
class StepPlan:
    """One step: who takes part, who was admitted and who was preempted for it."""

    budget_left_tokens: int
    scored_left_tokens: int = MAX_SCORED_TOKENS
    entries: list[ScheduledSequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Holds the waiting and the running sequences. ``limits`` may be replaced between any two steps."""

    def __init__(self, blocks: BlockAllocator, limits: SchedulerLimits) -> None:
        self.blocks = blocks
        self.limits = limits
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._admitting = True
        self._num_admissions = 0
        self._num_turns = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def submit(self, sequence: Sequence) -> None:
        """Queues a sequence.

        Raises:
            RequestError: even alone it could not fit into the pool.
        """
        if sequence.max_cached_tokens > self.blocks.capacity_tokens:
            capacity = self.blocks.capacity_tokens
            raise RequestError(
                f"{sequence.num_prompt_tokens} prompt tokens and max_tokens {sequence.max_output_tokens} never fit "
                f"into this engine's KV cache of {capacity} tokens; shorten the prompt or lower max_tokens",
                param="max_tokens" if sequence.num_prompt_tokens <= capacity else "prompt",
                code="context_length_exceeded",
            )
        self._waiting.append(sequence)

    def schedule(self) -> StepPlan:
        """Plans the next step. The plan is empty only when nothing is waiting or running."""
        plan = StepPlan(self.limits.max_num_batched_tokens)
        self._schedule_decodes(plan)
        self._schedule_prefills(plan)
        self._admit(plan)
        return plan

    def grant_drafts(self, plan: StepPlan, entry: ScheduledSequence, drafts: list[int]) -> None:
        """Adds as many of ``drafts`` to the entry as budget and free blocks allow. Preempts nobody for them."""
        num_granted = min(len(drafts), plan.budget_left_tokens)
        sequence = entry.sequence
        while num_granted > 0 and not self.blocks.grow(sequence.sequence_id, len(sequence.token_ids) + num_granted):
            num_granted -= 1
        entry.drafts = drafts[:num_granted]
        plan.budget_left_tokens -= num_granted

    def commit(self, entry: ScheduledSequence, num_accepted: int) -> None:
        """Books a step that has run: the entry's tokens and its first ``num_accepted`` drafts are in the cache."""
        sequence = entry.sequence
        sequence.num_computed_tokens += entry.num_tokens + num_accepted
        if num_accepted < len(entry.drafts):
            self.blocks.shrink(sequence.sequence_id, max(len(sequence.token_ids), sequence.num_computed_tokens + 1))

    def remove(self, sequence: Sequence) -> None:
        """Forgets a sequence that has finished, failed or was cancelled, and frees its blocks."""
        self.blocks.release(sequence.sequence_id)
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def _schedule_decodes(self, plan: StepPlan) -> None:
        # Those that a small budget left out of the last step come first.
        for sequence in sorted(self._running, key=lambda s: s.turn):
            if plan.budget_left_tokens == 0:
                return
            if sequence.num_pending_tokens == 1 and self._make_room(plan, sequence):
                self._add(plan, sequence, 1)

    def _schedule_prefills(self, plan: StepPlan) -> None:
        for sequence in list(self._running):
            if sequence.num_pending_tokens > 1:
                self._add_chunk(plan, sequence)

    def _admit(self, plan: StepPlan) -> None:
        while (
            self._waiting
            and len(self._running) < self.limits.max_num_seqs
            and plan.budget_left_tokens > 0
            and self._admission_is_open()
        ):
            head = self._waiting[0]
            # The whole prompt gets its blocks at once, so that prompts in flight never starve each other.
            if not self.blocks.grow(head.sequence_id, len(head.token_ids)):
                return
            self._running.append(self._waiting.popleft())
            head.admission = self._num_admissions
            self._num_admissions += 1
            plan.admitted.append(head)
            self._add_chunk(plan, head)

    def _admission_is_open(self) -> bool:
        """Hysteresis between the watermarks; an idle engine always admits one."""
        usage_ratio = self.blocks.usage_ratio
        if usage_ratio > self.limits.kv_high_watermark:
            self._admitting = False
        elif usage_ratio <= self.limits.kv_low_watermark:
            self._admitting = True
        return self._admitting or not self._running

    def _add_chunk(self, plan: StepPlan, sequence: Sequence) -> None:
        num_tokens = min(sequence.num_pending_tokens, self.limits.prefill_chunk_tokens, plan.budget_left_tokens)
        if sequence.scores_prompt:
            num_tokens = min(num_tokens, plan.scored_left_tokens)
            plan.scored_left_tokens -= num_tokens
        if num_tokens > 0:
            self._add(plan, sequence, num_tokens)

    def _add(self, plan: StepPlan, sequence: Sequence, num_tokens: int) -> None:
        plan.entries.append(ScheduledSequence(sequence, num_tokens))
        plan.budget_left_tokens -= num_tokens
        sequence.turn = self._num_turns
        self._num_turns += 1

    def _make_room(self, plan: StepPlan, sequence: Sequence) -> bool:
        """Gets the sequence a block for its pending token; ``False`` when it was preempted (now or before)."""
        while sequence in self._running:
            if self.blocks.grow(sequence.sequence_id, len(sequence.token_ids)):
                return True
            self._preempt(plan, max(self._running, key=lambda s: s.admission))
        return False

    def _preempt(self, plan: StepPlan, victim: Sequence) -> None:
        self.blocks.release(victim.sequence_id)
        self._running.remove(victim)
        self._waiting.appendleft(victim)
        for entry in [e for e in plan.entries if e.sequence is victim]:
            plan.entries.remove(entry)
            plan.budget_left_tokens += entry.num_tokens
        victim.num_computed_tokens = 0
        plan.preempted.append(victim)
        # What was just taken away must not come straight back: wait for the low watermark.
        self._admitting = False
