"""The scheduler: which sequences take part in the next step, and with how many tokens.

Continuous batching (Yu et al., Orca, OSDI 2022) with chunked prefill (Agrawal et al., Sarathi-Serve, OSDI 2024): a
step has one token budget; decodes take theirs first, so that no prompt stalls them, then the prompts in flight, then
new sequences, both in the order of the scheduling policy. While somebody else has a prompt to prefill, one prompt
takes no more than half of what is left, so that a long one does not hold up the short ones behind it.

The sequence that is first among the running is never preempted and may own more than the usable pool, so there is
always progress, whatever the limits are changed to. The core calls the scheduler between steps, from one thread. Pure
Python; it never sees a tensor.
"""

from __future__ import annotations

from trimtab.engine.embedded.kv.allocator import BlockAllocator
from trimtab.engine.embedded.scheduling.admission import OutputLengths, peak_tokens
from trimtab.engine.embedded.scheduling.limits import PressureAction, SchedulerLimits
from trimtab.engine.embedded.scheduling.plan import Refusal, ScheduledSequence, StepPlan
from trimtab.engine.embedded.scheduling.sequence import Sequence
from trimtab.engine.embedded.scheduling.step_time import StepTimeModel
from trimtab.engine.embedded.scheduling.waiting import WaitingQueue, rank
from trimtab.errors import RequestError

# The first prompt of a step gets at least this many tokens, however short max_step_ms is: it must come to an end.
MIN_CHUNK_TOKENS = 16
# Blocks compressed in one step: 64 blocks of SmolLM2-135M take about 20 ms, which everybody who runs waits for.
MAX_COMPRESSED_BLOCKS = 64


class Scheduler:
    """Holds the waiting and the running sequences. ``limits`` may be replaced between any two steps."""

    def __init__(self, blocks: BlockAllocator, limits: SchedulerLimits, step_time: StepTimeModel) -> None:
        self.blocks = blocks
        self.limits = limits
        self._step_time = step_time
        self._waiting = WaitingQueue()
        self._running: list[Sequence] = []
        self._output_lengths = OutputLengths()
        self._admitting = True
        self._relieving = False
        self._num_admissions = 0
        self._num_turns = 0

    @property
    def limits(self) -> SchedulerLimits:
        return self._limits

    @limits.setter
    def limits(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self.blocks.caching = limits.prefix_cache
        self.blocks.set_usable_ratio(limits.kv_usable_ratio)

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
        self._waiting.add(sequence)

    def schedule(self, now_s: float) -> StepPlan:
        """Plans the next step. Nobody takes part only when nothing is waiting or running, or all were refused."""
        plan = StepPlan(self.limits.max_num_batched_tokens, self.limits.max_prefill_tokens)
        self._refuse_late(plan, now_s)
        self._relieve_pressure(plan)
        self._schedule_decodes(plan)
        self._schedule_prefills(plan, now_s)
        self._admit(plan, now_s)
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
        """Books a step that has run: the entry's tokens and its first ``num_accepted`` drafts are in the cache.

        Call it before the accepted drafts are appended to the sequence, ``publish`` after.
        """
        sequence = entry.sequence
        sequence.num_computed_tokens += entry.num_tokens + num_accepted
        if num_accepted < len(entry.drafts):
            self.blocks.shrink(sequence.sequence_id, max(len(sequence.token_ids), sequence.num_computed_tokens + 1))

    def publish(self, sequence: Sequence) -> None:
        """Lets later sequences find what this one has computed."""
        # A stop string may have cut accepted drafts off again.
        num_tokens = min(sequence.num_computed_tokens, len(sequence.token_ids))
        self.blocks.publish(sequence.sequence_id, sequence.token_ids, num_tokens)

    def finish(self, sequence: Sequence) -> None:
        """Forgets a sequence that has all of its output; its length tells what to expect of others."""
        if sequence.max_output_tokens:
            self.expect_output(sequence.num_output_tokens)
        self.remove(sequence)

    def expect_output(self, num_tokens: int) -> None:
        """Takes the length of an output as one of those to expect."""
        self._output_lengths.add(num_tokens)

    def remove(self, sequence: Sequence) -> None:
        """Forgets a sequence that has finished, failed or was cancelled, and frees its blocks."""
        self.blocks.release(sequence.sequence_id)
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def forget_computed(self) -> None:
        """Gives all blocks back and computes everything again: their content is not to be trusted any more."""
        for sequence in list(self._running):
            self._running.remove(sequence)
            self._waiting.add(sequence)
        for sequence in self._waiting:
            self.blocks.release(sequence.sequence_id)
            sequence.num_computed_tokens = 0
        self.blocks.forget_prefixes()

    def _refuse_late(self, plan: StepPlan, now_s: float) -> None:
        for sequence, reason in self._waiting.late(self.limits, now_s):
            self._waiting.remove(sequence)
            plan.refused.append(Refusal(sequence, reason))

    def _relieve_pressure(self, plan: StepPlan) -> None:
        """Above the high watermark the pressure action starts; it goes on until the low one is reached."""
        if self.blocks.usage_ratio > self.limits.kv_high_watermark:
            self._relieving = True
        elif self.blocks.usage_ratio <= self.limits.kv_low_watermark:
            self._relieving = False
        if not self._relieving:
            return
        if self.limits.kv_pressure_action is PressureAction.COMPRESS:
            self._compress(plan, MAX_COMPRESSED_BLOCKS)
            return
        while self.blocks.usage_ratio > self.limits.kv_low_watermark:
            victims = self._victims()
            if not victims:
                return
            self._preempt(plan, victims[0])

    def _schedule_decodes(self, plan: StepPlan) -> None:
        # Those that a small budget left out of the last step come first.
        for sequence in sorted(self._running, key=lambda s: s.turn):
            if plan.budget_left_tokens == 0 or len(plan.entries) == self.limits.max_decode_seqs:
                return
            if sequence.num_pending_tokens == 1 and self._make_room(plan, sequence):
                self._add(plan, sequence, 1)

    def _schedule_prefills(self, plan: StepPlan, now_s: float) -> None:
        prefilling = [s for s in self._running if s.num_pending_tokens > 1]
        prefilling.sort(key=lambda s: rank(s, self.limits, now_s))
        others_wait = bool(self._waiting) and len(self._running) < self.limits.max_num_seqs
        for index, sequence in enumerate(prefilling, start=1):
            self._add_chunk(plan, sequence, is_last=index == len(prefilling) and not others_wait)

    def _admit(self, plan: StepPlan, now_s: float) -> None:
        if plan.preempted:
            return  # what was just taken away must not come straight back
        while (
            self._waiting
            and len(self._running) < self.limits.max_num_seqs
            and min(plan.budget_left_tokens, plan.prefill_left_tokens) > 0
            and self._admission_is_open()
        ):
            head = self._waiting.first(self.limits, now_s)
            if not self._fits(head) or not self._give_blocks(head):
                return
            self._waiting.remove(head)
            self._running.append(head)
            head.admission = self._num_admissions
            self._num_admissions += 1
            plan.admitted.append(head)
            self._add_chunk(plan, head, is_last=not self._waiting)

    def _admission_is_open(self) -> bool:
        """Hysteresis between the watermarks; an idle engine always admits one."""
        usage_ratio = self.blocks.usage_ratio
        if usage_ratio > self.limits.kv_high_watermark:
            self._admitting = False
        elif usage_ratio <= self.limits.kv_low_watermark:
            self._admitting = True
        return self._admitting or not self._running

    def _fits(self, head: Sequence) -> bool:
        """Whether, as far as can be expected, everybody's output stays below the high watermark with ``head`` too."""
        if not self._running:
            return True
        held = [(self.blocks.held_tokens(s.sequence_id), s) for s in self._running]
        held.append((float(len(head.token_ids)), head))
        remaining = self._output_lengths.expected_remaining
        peak = peak_tokens((h, remaining(s.num_output_tokens, s.max_output_tokens)) for h, s in held)
        return peak <= self.limits.kv_high_watermark * self.blocks.capacity_tokens

    def _give_blocks(self, head: Sequence) -> bool:
        """Blocks for the whole prompt at once, so that prompts in flight never starve each other."""
        alone, sequence_id = not self._running, head.sequence_id
        if self.blocks.is_swapped(sequence_id):
            return self.blocks.swap_in(sequence_id, len(head.token_ids), beyond=alone)
        reuse = not head.scores_prompt
        num_cached = self.blocks.admit(sequence_id, head.token_ids, head.cache_salt, reuse=reuse, beyond=alone)
        if num_cached is None:
            return False
        head.num_computed_tokens = num_cached
        if head.num_cached_tokens is None:
            head.num_cached_tokens = num_cached
        return True

    def _add_chunk(self, plan: StepPlan, sequence: Sequence, *, is_last: bool) -> None:
        left = min(plan.prefill_left_tokens, plan.budget_left_tokens)
        share = left if is_last else -(-left // 2)
        num_tokens = min(sequence.num_pending_tokens, self.limits.prefill_chunk_tokens, share)
        if sequence.scores_prompt:
            num_tokens = min(num_tokens, plan.scored_left_tokens)
        num_tokens = self._in_time(plan, sequence, num_tokens)
        if num_tokens > 0:
            plan.prefill_left_tokens -= num_tokens
            plan.scored_left_tokens -= num_tokens if sequence.scores_prompt else 0
            self._add(plan, sequence, num_tokens)

    def _in_time(self, plan: StepPlan, sequence: Sequence, num_tokens: int) -> int:
        """The most of ``num_tokens`` with which the step is expected to keep within ``max_step_s``."""
        num_rows, num_pairs, past = plan.num_rows, plan.num_pairs, sequence.num_computed_tokens
        first_prompt = all(e.sequence.num_pending_tokens == 1 for e in plan.entries)
        if first_prompt and not plan.entries:
            return num_tokens  # nobody decodes, so nobody's stream is held up
        low, high = min(num_tokens, MIN_CHUNK_TOKENS) if first_prompt else 0, num_tokens
        while low < high:
            middle = (low + high + 1) // 2
            step_s = self._step_time.predict(num_rows + middle, num_pairs + middle * (past + middle))
            if step_s is None or step_s <= self.limits.max_step_s:
                low = middle
            else:
                high = middle - 1
        return low

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
            victims = self._victims()
            if not victims:
                return self.blocks.grow(sequence.sequence_id, len(sequence.token_ids), beyond=True)
            compresses = self.limits.kv_pressure_action is PressureAction.COMPRESS
            if not (compresses and self._compress(plan, MAX_COMPRESSED_BLOCKS)):
                self._preempt(plan, victims[0])
        return False

    def _victims(self) -> list[Sequence]:
        """Who may have to give way, the first one first: of the lowest priority whoever is cheapest to compute again.

        One that has been preempted before counts for more, and the first among the running is never a victim.
        """
        by_standing = sorted(self._running, key=lambda s: (s.priority, s.admission))
        return sorted(
            by_standing[1:],
            key=lambda s: (-s.priority, s.num_computed_tokens * (1 + s.num_preemptions), -s.admission),
        )

    def _compress(self, plan: StepPlan, max_blocks: int) -> int:
        victims = self._victims() or self._running
        computed = [(s.sequence_id, s.num_computed_tokens) for s in victims]
        num_compressed = self.blocks.compress(computed, max_blocks)
        plan.num_compressed_blocks += num_compressed
        return num_compressed

    def _preempt(self, plan: StepPlan, victim: Sequence) -> None:
        swaps = self.limits.kv_pressure_action is PressureAction.SWAP
        if swaps and self.blocks.swap_out(victim.sequence_id, victim.num_computed_tokens):
            plan.swapped.append(victim)
        else:
            self.blocks.release(victim.sequence_id)
            victim.num_computed_tokens = 0
            plan.recomputed.append(victim)
        victim.num_preemptions += 1
        self._running.remove(victim)
        self._waiting.add(victim)
        for entry in [e for e in plan.entries if e.sequence is victim]:
            plan.entries.remove(entry)
            plan.budget_left_tokens += entry.num_tokens
        self._admitting = False  # until the low watermark
