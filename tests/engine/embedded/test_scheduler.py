"""The scheduler, driven by random traffic and random live changes, with a model of random tokens."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.engine.embedded.blocks import BlockAllocator
from trimtab.engine.embedded.scheduler import Scheduler, SchedulerLimits, StepPlan
from trimtab.engine.embedded.sequence import Sequence
from trimtab.errors import RequestError

LIMITS = SchedulerLimits(4, 32, 16, kv_high_watermark=0.9, kv_low_watermark=0.6)


def make(sequence_id: int, num_prompt: int, num_output: int, *, scores_prompt: bool = False) -> Sequence:
    return Sequence(sequence_id, list(range(num_prompt)), num_prompt, num_output, scores_prompt=scores_prompt)


def run_step(scheduler: Scheduler, rng: random.Random, drafts: int = 0) -> tuple[StepPlan, list[Sequence]]:
    """Plans and 'runs' one step; returns the plan and who finished."""
    plan = scheduler.schedule()
    finished = []
    for entry in plan.entries:
        sequence = entry.sequence
        left = sequence.max_output_tokens - sequence.num_output_tokens - 1
        if entry.completes and drafts and left > 0:
            scheduler.grant_drafts(plan, entry, [7] * min(drafts, left))
    used = sum(e.num_tokens + len(e.drafts) for e in plan.entries)
    assert used == scheduler.limits.max_num_batched_tokens - plan.budget_left_tokens
    assert used <= scheduler.limits.max_num_batched_tokens
    for entry in plan.entries:
        sequence, completes = entry.sequence, entry.completes
        fed = sequence.num_computed_tokens + entry.num_tokens + len(entry.drafts)
        assert len(scheduler.blocks.table(sequence.sequence_id)) >= scheduler.blocks.blocks_for(fed)
        accepted = rng.randint(0, len(entry.drafts))
        scheduler.commit(entry, accepted)
        if completes and sequence.max_output_tokens:
            sequence.token_ids += [7] * (accepted + 1)
        if completes and sequence.num_output_tokens >= sequence.max_output_tokens:
            scheduler.remove(sequence)
            finished.append(sequence)
    return plan, finished


@st.composite
def limits(draw: st.DrawFn) -> SchedulerLimits:
    high = draw(st.floats(0.1, 1.0))
    return SchedulerLimits(
        draw(st.integers(1, 8)),
        draw(st.integers(16, 64)),
        draw(st.integers(16, 64)),
        high,
        draw(st.floats(0.05, high)),
    )


@settings(max_examples=150, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 40), st.booleans()), min_size=1, max_size=25),
    num_blocks=st.integers(13, 40),
    changes=st.lists(limits(), min_size=1, max_size=5),
    drafts=st.integers(0, 7),
    seed=st.integers(0, 10_000),
)
def test_all_finish_within_every_limit_and_no_block_is_lost(
    shapes: list[tuple[int, int, bool]], num_blocks: int, changes: list[SchedulerLimits], drafts: int, seed: int
) -> None:
    rng = random.Random(seed)
    scheduler = Scheduler(BlockAllocator(num_blocks, 8), changes[0])
    waiting = [make(i, p, o, scores_prompt=s) for i, (p, o, s) in enumerate(shapes)]
    open_ids = {s.sequence_id for s in waiting}
    for _ in range(20_000):
        if waiting and rng.random() < 0.5:
            scheduler.submit(waiting.pop(0))
        if rng.random() < 0.1:
            scheduler.limits = rng.choice(changes)
        num_running = scheduler.num_running
        plan, finished = run_step(scheduler, rng, drafts)
        assert scheduler.num_running <= max(num_running, scheduler.limits.max_num_seqs)
        assert all(e.num_tokens <= scheduler.limits.prefill_chunk_tokens for e in plan.entries)
        assert plan.entries or not scheduler.num_running, "an engine with work must move"
        open_ids -= {s.sequence_id for s in finished}
        if not waiting and not open_ids:
            break
    assert not open_ids
    assert scheduler.blocks.num_used == 0
    assert scheduler.num_running == scheduler.num_waiting == 0


def test_sequences_are_admitted_in_the_order_of_their_arrival() -> None:
    rng, scheduler = random.Random(0), Scheduler(BlockAllocator(64, 8), LIMITS)
    for i in range(12):
        scheduler.submit(make(i, 10 + i, 5))
    admitted: list[int] = []
    while scheduler.num_waiting:
        plan, _ = run_step(scheduler, rng)
        admitted += [s.sequence_id for s in plan.admitted]
    assert admitted == list(range(12))


def test_a_budget_below_the_number_of_decodes_serves_all_in_turn() -> None:
    rng, scheduler = random.Random(0), Scheduler(BlockAllocator(64, 8), replace(LIMITS, max_num_seqs=8))
    sequences = [make(i, 1, 30) for i in range(8)]
    for sequence in sequences:
        scheduler.submit(sequence)
    run_step(scheduler, rng)
    scheduler.limits = replace(scheduler.limits, max_num_batched_tokens=3)
    for _ in range(16):
        run_step(scheduler, rng)
        counts = [s.num_output_tokens for s in sequences]
        assert max(counts) - min(counts) <= 1


def test_lowering_max_num_seqs_lets_the_running_ones_finish_and_admits_no_more() -> None:
    rng, scheduler = random.Random(0), Scheduler(BlockAllocator(64, 8), LIMITS)
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
    limits = replace(LIMITS, max_num_seqs=100, max_num_batched_tokens=1000, prefill_chunk_tokens=1000)
    scheduler = Scheduler(BlockAllocator(10, 8), limits)  # stops above 9 blocks, resumes at 6
    sequences = [make(i, 16, 8) for i in range(8)]
    for sequence in sequences:
        scheduler.submit(sequence)
    assert len(scheduler.schedule().admitted) == 5  # ten blocks: the fifth was admitted at eight
    scheduler.remove(sequences[0])
    assert not scheduler.schedule().admitted  # eight blocks: below the high one, above the low one
    scheduler.remove(sequences[1])
    assert [s.sequence_id for s in scheduler.schedule().admitted] == [5, 6]


def test_an_idle_engine_admits_one_whatever_the_watermarks_say() -> None:
    limits = replace(LIMITS, kv_high_watermark=0.1, kv_low_watermark=0.05, prefill_chunk_tokens=100)
    scheduler = Scheduler(BlockAllocator(4, 8), limits)
    for i in range(2):
        scheduler.submit(make(i, 32, 1))
    assert [s.sequence_id for s in scheduler.schedule().admitted] == [0]


def test_the_one_admitted_last_is_preempted_and_comes_first_among_the_waiting() -> None:
    rng = random.Random(0)
    scheduler = Scheduler(BlockAllocator(4, 8), replace(LIMITS, kv_high_watermark=1.0, kv_low_watermark=1.0))
    first, second, third = make(0, 15, 10), make(1, 15, 10), make(2, 15, 1)
    for sequence in (first, second, third):
        scheduler.submit(sequence)
    preempted = []
    while not preempted:
        plan, _ = run_step(scheduler, rng)
        preempted = plan.preempted
    assert preempted == [second]
    assert second.num_computed_tokens == 0
    admitted: list[Sequence] = []
    finished: list[Sequence] = []
    while len(finished) < 3:
        plan, ended = run_step(scheduler, rng)
        admitted += plan.admitted
        finished += ended
    assert admitted == [second, third]
    assert finished[0] is first


def test_a_sequence_that_can_never_fit_is_refused_by_name() -> None:
    scheduler = Scheduler(BlockAllocator(4, 8), LIMITS)
    with pytest.raises(RequestError, match="KV cache of 32 tokens") as refused:
        scheduler.submit(make(0, 33, 1))
    assert refused.value.param == "prompt"
    with pytest.raises(RequestError) as refused:
        scheduler.submit(make(0, 30, 4))
    assert refused.value.param == "max_tokens"
    scheduler.submit(make(0, 30, 3))


def test_drafts_take_only_what_budget_and_free_blocks_leave() -> None:
    rng = random.Random(0)
    scheduler = Scheduler(BlockAllocator(3, 8), replace(LIMITS, max_num_batched_tokens=20))
    sequence = make(0, 20, 4)
    scheduler.submit(sequence)
    while sequence.num_output_tokens < 1:
        run_step(scheduler, rng)
    plan = scheduler.schedule()
    scheduler.grant_drafts(plan, plan.entries[0], [1] * 7)
    assert len(plan.entries[0].drafts) == 3  # 21 tokens and 3 drafts fill the 24 slots
