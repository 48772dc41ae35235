"""The scheduler, driven by random traffic and random live changes, with a model of random tokens."""

import random
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from trimtab.engine.embedded.kv.allocator import BlockAllocator
from trimtab.engine.embedded.kv.pages import Pages
from trimtab.engine.embedded.scheduling.limits import PressureAction, SchedulerLimits, SchedulingPolicy
from trimtab.engine.embedded.scheduling.plan import StepPlan
from trimtab.engine.embedded.scheduling.scheduler import MIN_CHUNK_TOKENS, Scheduler
from trimtab.engine.embedded.scheduling.sequence import Sequence
from trimtab.engine.embedded.scheduling.step_time import StepTimeModel
from trimtab.errors import RequestError
from trimtab.kernels.kv_cache import KVType

LIMITS = SchedulerLimits(
    max_num_seqs=4,
    max_num_batched_tokens=32,
    prefill_chunk_tokens=16,
    max_prefill_tokens=1000,
    max_decode_seqs=1000,
    max_step_s=60.0,
    kv_high_watermark=0.9,
    kv_low_watermark=0.6,
    kv_usable_ratio=1.0,
    kv_pressure_action=PressureAction.RECOMPUTE,
    scheduling_policy=SchedulingPolicy.FCFS,
    ageing_s=5.0,
    max_queue_s=600.0,
    prefix_cache=False,
)
BIG = replace(LIMITS, max_num_seqs=100, max_num_batched_tokens=1000, prefill_chunk_tokens=1000)
NO_WATERMARKS = {"kv_high_watermark": 1.0, "kv_low_watermark": 1.0}


def make(sequence_id: int, num_prompt: int, num_output: int, **more: object) -> Sequence:
    return Sequence(sequence_id, list(range(num_prompt)), num_prompt, num_output, **more)  # type: ignore[arg-type]


def new_scheduler(num_blocks: int, limits: SchedulerLimits = LIMITS, num_swap_blocks: int = 0) -> Scheduler:
    per_page = {KVType.FULL: 1, KVType.INT8: 2}
    swap = Pages(num_swap_blocks, per_page) if num_swap_blocks else None
    return Scheduler(BlockAllocator(Pages(num_blocks, per_page), 8, swap=swap), limits, StepTimeModel())


def run_step(
    scheduler: Scheduler, rng: random.Random, drafts: int = 0, now_s: float = 0.0
) -> tuple[StepPlan, list[Sequence]]:
    """Plans and 'runs' one step; returns the plan and who finished."""
    plan = scheduler.schedule(now_s)
    limits, finished = scheduler.limits, []
    for entry in plan.entries:
        sequence = entry.sequence
        left = sequence.max_output_tokens - sequence.num_output_tokens - 1
        if entry.completes and drafts and left > 0:
            scheduler.grant_drafts(plan, entry, [7] * min(drafts, left))
    assert plan.num_rows == limits.max_num_batched_tokens - plan.budget_left_tokens
    assert plan.num_rows <= limits.max_num_batched_tokens
    assert plan.prefill_left_tokens >= 0
    assert plan.scored_left_tokens >= 0
    assert len({id(e.sequence) for e in plan.entries}) == len(plan.entries)
    scheduler.blocks.take_moves()
    for entry in plan.entries:
        sequence, completes = entry.sequence, entry.completes
        assert entry.num_tokens <= limits.prefill_chunk_tokens
        fed = sequence.num_computed_tokens + entry.num_rows
        assert len(scheduler.blocks.table(sequence.sequence_id)) >= scheduler.blocks.blocks_for(fed)
        accepted = rng.randint(0, len(entry.drafts))
        scheduler.commit(entry, accepted)
        if completes and sequence.max_output_tokens:
            sequence.token_ids += [7] * (accepted + 1)
        scheduler.publish(sequence)
        if completes and sequence.num_output_tokens >= sequence.max_output_tokens:
            scheduler.finish(sequence)
            finished.append(sequence)
    return plan, finished


@st.composite
def limits(draw: st.DrawFn) -> SchedulerLimits:
    high = draw(st.floats(0.1, 1.0))
    return SchedulerLimits(
        max_num_seqs=draw(st.integers(1, 8)),
        max_num_batched_tokens=draw(st.integers(16, 64)),
        prefill_chunk_tokens=draw(st.integers(16, 64)),
        max_prefill_tokens=draw(st.integers(16, 64)),
        max_decode_seqs=draw(st.integers(1, 8)),
        max_step_s=draw(st.sampled_from([0.001, 0.02, 60.0])),
        kv_high_watermark=high,
        kv_low_watermark=draw(st.floats(0.05, high)),
        kv_usable_ratio=draw(st.floats(0.05, 1.0)),
        kv_pressure_action=draw(st.sampled_from(PressureAction)),
        scheduling_policy=draw(st.sampled_from(SchedulingPolicy)),
        ageing_s=draw(st.sampled_from([0.5, 5.0, 100.0])),
        max_queue_s=draw(st.sampled_from([20.0, 600.0])),
        prefix_cache=draw(st.booleans()),
    )


STEP_S = 0.1


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, cancellations, live changes and steps in any order."""

    @initialize(
        num_blocks=st.integers(13, 40), num_swap=st.sampled_from([0, 4, 20]), first=limits(), seed=st.integers()
    )
    def start(self, num_blocks: int, num_swap: int, first: SchedulerLimits, seed: int) -> None:
        self.rng = random.Random(seed)
        self.scheduler = new_scheduler(num_blocks, first, num_swap)
        self.open: dict[int, Sequence] = {}
        self.now_s, self.num_made = 0.0, 0

    @rule(change=limits())
    def change(self, change: SchedulerLimits) -> None:
        self.scheduler.limits = change

    @rule(
        num_prompt=st.integers(1, 60), num_output=st.integers(0, 40), scores=st.booleans(),
        priority=st.integers(-1, 1), deadline_s=st.none() | st.floats(0, 10), shared=st.booleans(),
    )  # fmt: skip
    def submit(
        self, num_prompt: int, num_output: int, scores: bool, priority: int, deadline_s: float | None, shared: bool
    ) -> None:
        sequence = make(
            self.num_made, num_prompt, num_output, scores_prompt=scores, priority=priority, arrival_s=self.now_s,
            deadline_s=None if deadline_s is None else self.now_s + deadline_s,
            cache_salt="" if shared else str(self.num_made),
        )  # fmt: skip
        self.num_made += 1
        try:
            self.scheduler.submit(sequence)
        except RequestError:
            assert sequence.max_cached_tokens > self.scheduler.blocks.capacity_tokens
        else:
            self.open[sequence.sequence_id] = sequence

    @rule(at=st.integers(0, 50))
    def cancel(self, at: int) -> None:
        if self.open:
            sequence = self.open.pop(sorted(self.open)[at % len(self.open)])
            self.scheduler.remove(sequence)

    @rule(drafts=st.integers(0, 7), num_steps=st.integers(1, 30))
    def step(self, drafts: int, num_steps: int) -> None:
        for _ in range(num_steps):
            self.one_step(drafts)

    def one_step(self, drafts: int) -> None:
        before = self.scheduler.num_running
        plan, finished = run_step(self.scheduler, self.rng, drafts, self.now_s)
        assert before + len(plan.admitted) - len(plan.preempted) == self.scheduler.num_running + len(finished)
        assert self.scheduler.num_running <= max(before, self.scheduler.limits.max_num_seqs)
        for refusal in plan.refused:
            sequence = self.open.pop(refusal.sequence.sequence_id)
            assert sequence.num_cached_tokens is None, "only who was never admitted may be refused"
        for sequence in finished:
            del self.open[sequence.sequence_id]
        assert plan.entries or not self.open, "an engine with work must move"
        self.now_s += STEP_S

    @invariant()
    def all_are_waiting_or_running(self) -> None:
        if hasattr(self, "open"):
            assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.open)

    def teardown(self) -> None:
        if not hasattr(self, "open"):
            return
        for _ in range(20_000):
            if not self.open:
                break
            self.one_step(0)
        assert not self.open
        assert self.scheduler.blocks.owned_units == 0


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
test_all_finish_within_every_limit_and_no_block_is_lost = SchedulerMachine.TestCase


@pytest.mark.parametrize("policy", list(SchedulingPolicy))
@pytest.mark.parametrize("seed", range(3))
def test_nobody_starves_beyond_the_ageing_bound(policy: SchedulingPolicy, seed: int) -> None:
    """Whoever is admitted, nobody who came earlier and is older than the bound was left waiting instead."""
    rng = random.Random(seed)
    scheduler = new_scheduler(40, replace(LIMITS, scheduling_policy=policy, ageing_s=2.0))
    waiting: dict[int, Sequence] = {}
    for step in range(3000):
        now_s = step * STEP_S
        if rng.random() < 0.5:
            long = rng.random() < 0.2
            sequence = make(
                step, rng.randint(100, 200) if long else rng.randint(1, 20), rng.randint(1, 20),
                arrival_s=now_s, priority=rng.randint(0, 3),
            )  # fmt: skip
            scheduler.submit(sequence)
            waiting[step] = sequence
        plan, _ = run_step(scheduler, rng, now_s=now_s)
        waiting |= {s.sequence_id: s for s in plan.preempted}
        for sequence in plan.admitted:
            waiting.pop(sequence.sequence_id, None)
            overtaken = [w for w in waiting.values() if w.arrival_s < sequence.arrival_s]
            assert all(now_s - w.arrival_s < 2.0 for w in overtaken)


def teach_short_outputs(scheduler: Scheduler) -> None:
    """Lets it expect outputs of one token, whatever they may come to."""
    for _ in range(10):
        scheduler.expect_output(1)


def admitted_order(scheduler: Scheduler, now_s: float = 0.0) -> list[int]:
    rng, admitted = random.Random(0), []
    while scheduler.num_waiting:
        plan, _ = run_step(scheduler, rng, now_s=now_s)
        admitted += [s.sequence_id for s in plan.admitted]
    return admitted


def test_the_policies_admit_in_their_order() -> None:
    shapes = [(30, 1), (10, 0), (20, 2), (10, 1)]  # prompt tokens, priority
    for policy, expected in (
        (SchedulingPolicy.FCFS, [0, 1, 2, 3]),
        (SchedulingPolicy.PRIORITY, [1, 0, 3, 2]),
        (SchedulingPolicy.SHORTEST_PREFILL_FIRST, [1, 3, 2, 0]),
    ):
        scheduler = new_scheduler(64, replace(LIMITS, scheduling_policy=policy, max_num_seqs=1))
        for i, (num_prompt, priority) in enumerate(shapes):
            scheduler.submit(make(i, num_prompt, 5, priority=priority, arrival_s=i * 0.01))
        assert admitted_order(scheduler) == expected
        # Those that have waited for ageing_s come in the order of their arrival, before all others.
        for i, (num_prompt, priority) in enumerate(shapes):
            scheduler.submit(make(10 + i, num_prompt, 5, priority=priority, arrival_s=i * 0.01 + 3 * (i == 3)))
        aged = admitted_order(scheduler, now_s=5.02)
        assert aged[:3] == [10, 11, 12]


def test_an_earlier_deadline_comes_first_within_a_priority() -> None:
    limits_ = replace(LIMITS, scheduling_policy=SchedulingPolicy.PRIORITY, max_num_seqs=1)
    scheduler = new_scheduler(64, limits_)
    for i, deadline_s in enumerate((None, 9.0, 3.0)):
        scheduler.submit(make(i, 10, 5, deadline_s=deadline_s))
    assert admitted_order(scheduler) == [2, 1, 0]


def test_who_waits_too_long_is_refused_with_the_reason_and_who_was_admitted_once_never_is() -> None:
    rng = random.Random(0)
    scheduler = new_scheduler(6, replace(LIMITS, **NO_WATERMARKS, max_queue_s=10.0))
    teach_short_outputs(scheduler)
    first, second = make(0, 15, 17), make(1, 15, 17)
    scheduler.submit(first)
    scheduler.submit(second)
    preempted: list[Sequence] = []
    while not preempted:
        preempted = run_step(scheduler, rng)[0].preempted
    scheduler.submit(make(2, 5, 5, arrival_s=1.0))
    scheduler.submit(make(3, 5, 5, arrival_s=1.0, deadline_s=4.0))
    plan, _ = run_step(scheduler, rng, now_s=4.5)
    assert [(r.sequence.sequence_id, r.reason) for r in plan.refused] == [
        (3, "its deadline passed after 3500 ms in the queue")
    ]
    plan, _ = run_step(scheduler, rng, now_s=11.5)
    assert [(r.sequence.sequence_id, r.reason) for r in plan.refused] == [
        (2, "it waited 10500 ms; max_queue_ms is 10000")
    ]
    while scheduler.num_running or scheduler.num_waiting:
        assert not run_step(scheduler, rng, now_s=99.0)[0].refused


def test_a_budget_below_the_number_of_decodes_serves_all_in_turn() -> None:
    for change in ({"max_num_batched_tokens": 3}, {"max_decode_seqs": 3}):
        rng, scheduler = random.Random(0), new_scheduler(64, replace(LIMITS, max_num_seqs=8))
        sequences = [make(i, 1, 30) for i in range(8)]
        for sequence in sequences:
            scheduler.submit(sequence)
        run_step(scheduler, rng)
        scheduler.limits = replace(scheduler.limits, **change)
        for _ in range(16):
            run_step(scheduler, rng)
            counts = [s.num_output_tokens for s in sequences]
            assert max(counts) - min(counts) <= 1


def test_a_long_prompt_leaves_half_of_the_step_to_the_short_one_behind_it() -> None:
    rng, scheduler = random.Random(0), new_scheduler(200, replace(LIMITS, prefill_chunk_tokens=32))
    long = make(0, 1000, 5)
    scheduler.submit(long)
    plan, _ = run_step(scheduler, rng)
    assert plan.entries[0].num_tokens == 32  # nobody else is there
    short = make(1, 30, 5)
    scheduler.submit(short)
    steps = 0
    while short.num_output_tokens == 0:
        plan, _ = run_step(scheduler, rng)
        steps += 1
        assert plan.entries[0].num_tokens == 16
    assert steps == 2


def test_max_prefill_tokens_bounds_all_prompts_of_a_step_together() -> None:
    rng, scheduler = random.Random(0), new_scheduler(200, replace(BIG, max_prefill_tokens=40))
    for i in range(5):
        scheduler.submit(make(i, 30, 5))
    plan, _ = run_step(scheduler, rng)
    assert plan.num_rows == 40


def test_prefill_chunks_shrink_to_max_step_ms_while_somebody_decodes() -> None:
    rng = random.Random(0)
    model = StepTimeModel()
    for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        model.observe(rows, 0, 0.010 + 0.001 * rows)
    blocks = BlockAllocator(Pages(200, {KVType.FULL: 1}), 8)
    scheduler = Scheduler(blocks, replace(BIG, max_step_s=0.060), model)
    scheduler.submit(make(0, 10, 50))
    run_step(scheduler, rng)
    scheduler.submit(make(1, 500, 5))
    plan, _ = run_step(scheduler, rng)
    assert 45 <= plan.num_rows <= 51  # 10 ms and 1 ms a row
    scheduler.limits = replace(BIG, max_step_s=0.001)
    plan, _ = run_step(scheduler, rng)
    assert plan.num_rows == 1 + MIN_CHUNK_TOKENS


def test_lowering_max_num_seqs_lets_the_running_ones_finish_and_admits_no_more() -> None:
    rng, scheduler = random.Random(0), new_scheduler(64)
    for i in range(6):
        scheduler.submit(make(i, 4, 6 + i))
    run_step(scheduler, rng)
    assert scheduler.num_running == 4
    scheduler.limits = replace(LIMITS, max_num_seqs=1)
    while scheduler.num_running > 1:
        plan, _ = run_step(scheduler, rng)
        assert not plan.admitted
        assert not plan.preempted
    assert scheduler.num_waiting == 2


def test_admission_stops_above_the_high_watermark_and_resumes_at_the_low_one() -> None:
    scheduler = new_scheduler(10, BIG)  # stops above 9 blocks, resumes at 6
    sequences = [make(i, 16, 1) for i in range(8)]
    for sequence in sequences:
        scheduler.submit(sequence)
    assert len(scheduler.schedule(0.0).admitted) == 4  # eight blocks: with a fifth sequence they would be ten
    for sequence in sequences[:4]:
        assert scheduler.blocks.grow(sequence.sequence_id, 17, beyond=True) is (sequence in sequences[:2])
    scheduler.limits = replace(BIG, kv_pressure_action=PressureAction.COMPRESS)  # which finds nothing computed
    assert not scheduler.schedule(0.0).admitted  # ten blocks
    scheduler.remove(sequences[0])
    assert not scheduler.schedule(0.0).admitted  # seven: below the high one, above the low one
    scheduler.remove(sequences[1])
    assert [s.sequence_id for s in scheduler.schedule(0.0).admitted] == [4, 5]


def test_admission_expects_the_outputs_to_be_as_long_as_they_were() -> None:
    rng, scheduler = random.Random(0), new_scheduler(10, replace(BIG, kv_high_watermark=1.0))
    for i in range(10):
        scheduler.submit(make(i, 8, 3))
    while scheduler.num_running or scheduler.num_waiting:
        run_step(scheduler, rng)
    # Outputs had three tokens; up to 40 are allowed, which would be six blocks each.
    for i in range(10, 18):
        scheduler.submit(make(i, 13, 40))
    assert len(scheduler.schedule(0.0).admitted) == 4


def test_an_idle_engine_admits_one_whatever_the_watermarks_say() -> None:
    scheduler = new_scheduler(4, replace(BIG, kv_high_watermark=0.1, kv_low_watermark=0.05))
    for i in range(2):
        scheduler.submit(make(i, 32, 1))
    assert [s.sequence_id for s in scheduler.schedule(0.0).admitted] == [0]


def pressed(action: PressureAction, num_swap_blocks: int = 0) -> tuple[Scheduler, list[Sequence], StepPlan]:
    """Four sequences that decode beyond the high watermark; the plan is the first that acts."""
    rng, scheduler = random.Random(0), new_scheduler(12, replace(BIG, **NO_WATERMARKS), num_swap_blocks)
    teach_short_outputs(scheduler)
    sequences = [make(i, 16 + i, 40, priority=int(i == 1)) for i in range(4)]
    for sequence in sequences:
        scheduler.submit(sequence)
        run_step(scheduler, rng)
    assert scheduler.num_running == 4
    scheduler.limits = replace(BIG, kv_pressure_action=action, kv_high_watermark=0.5, kv_low_watermark=0.4)
    plan, _ = run_step(scheduler, rng)
    return scheduler, sequences, plan


def test_above_the_high_watermark_the_lowest_priority_then_the_cheapest_gives_way_down_to_the_low_one() -> None:
    scheduler, sequences, plan = pressed(PressureAction.RECOMPUTE)
    assert plan.recomputed[0] is sequences[1]  # of the lowest priority
    assert sequences[0] not in plan.recomputed  # the first one never is
    assert scheduler.blocks.usage_ratio <= 0.4
    assert all(s.num_computed_tokens == 0 for s in plan.recomputed)


def test_swapped_sequences_keep_what_they_computed_and_with_a_full_swap_space_are_recomputed() -> None:
    scheduler, _, plan = pressed(PressureAction.SWAP, num_swap_blocks=20)
    assert plan.swapped
    assert not plan.recomputed
    assert all(s.num_computed_tokens > 0 and scheduler.blocks.is_swapped(s.sequence_id) for s in plan.swapped)
    _, _, plan = pressed(PressureAction.SWAP, num_swap_blocks=4)
    assert len(plan.swapped) == 1
    assert plan.recomputed
    _, _, plan = pressed(PressureAction.SWAP)
    assert not plan.swapped
    assert plan.recomputed


def test_compression_makes_room_without_preempting_anybody() -> None:
    scheduler, sequences, plan = pressed(PressureAction.COMPRESS)
    assert plan.num_compressed_blocks > 0
    assert not plan.preempted
    types = [s.kv_type for s in scheduler.blocks.table(sequences[1].sequence_id)]
    assert types[:2] == [KVType.INT8, KVType.INT8]
    assert types[2] is KVType.FULL  # what is still being written stays


def test_a_sequence_that_can_never_fit_is_refused_by_name() -> None:
    scheduler = new_scheduler(4)
    with pytest.raises(RequestError, match="KV cache of 32 tokens") as refused:
        scheduler.submit(make(0, 33, 1))
    assert refused.value.param == "prompt"
    with pytest.raises(RequestError) as refused:
        scheduler.submit(make(0, 30, 4))
    assert refused.value.param == "max_tokens"
    scheduler.submit(make(0, 30, 3))


def test_drafts_take_only_what_budget_and_free_blocks_leave() -> None:
    rng = random.Random(0)
    scheduler = new_scheduler(3, replace(LIMITS, max_num_batched_tokens=20))
    sequence = make(0, 20, 4)
    scheduler.submit(sequence)
    while sequence.num_output_tokens < 1:
        run_step(scheduler, rng)
    plan = scheduler.schedule(0.0)
    scheduler.grant_drafts(plan, plan.entries[0], [1] * 7)
    assert len(plan.entries[0].drafts) == 3  # 21 tokens and 3 drafts fill the 24 slots


def test_what_cannot_be_trusted_is_computed_again() -> None:
    rng = random.Random(0)
    scheduler = new_scheduler(20, replace(BIG, prefix_cache=True), num_swap_blocks=10)
    sequences = [make(i, 20, 10) for i in range(3)]
    for sequence in sequences:
        scheduler.submit(sequence)
        run_step(scheduler, rng)
    scheduler.forget_computed()
    assert scheduler.blocks.owned_units == 0
    plan, _ = run_step(scheduler, rng)
    assert {s.sequence_id for s in plan.admitted} == {0, 1, 2}
    assert all(e.sequence.num_computed_tokens >= 20 for e in plan.entries)
    while scheduler.num_running:
        run_step(scheduler, rng)
    assert [s.num_output_tokens for s in sequences] == [10, 10, 10]
