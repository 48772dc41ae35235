"""Timelines become records; the ring forgets the oldest and says how many."""

import dataclasses
import itertools
import tracemalloc

import pytest

from trimtab.engine.contract import RequestOutcome, RequestRecord
from trimtab.engine.embedded.records import Ending, RecordRing, Timeline

ENDING = Ending("r", RequestOutcome.SUCCEEDED, 10, 3)


def test_a_record_has_the_times_of_its_timeline() -> None:
    timeline = Timeline(100.0, 5000.0)
    timeline.admitted_s = 100.5
    assert timeline.note_tokens(101.0) is None
    assert timeline.note_tokens(101.25) == 0.25
    assert timeline.note_tokens(103.0) == 1.75
    timeline.note_decode_step(0.2, 4)
    timeline.note_decode_step(0.4, 2)
    record = timeline.record(ENDING, 103.0)
    assert (record.queue_s, record.ttft_s, record.tpot_s, record.max_itl_s) == (0.5, 1.0, 1.0, 1.75)
    assert (record.duration_s, record.finished_unix_s) == (3.0, 5003.0)
    assert record.mean_batch_size == 3.0
    assert abs((record.mean_step_s or 0) - 0.3) < 1e-9


def test_figures_that_do_not_exist_are_none() -> None:
    record = Timeline(1.0, 1.0).record(Ending("r", RequestOutcome.CANCELLED, 10, 0), 2.0)
    assert (record.queue_s, record.ttft_s, record.tpot_s, record.max_itl_s) == (None, None, None, None)
    assert (record.mean_batch_size, record.mean_step_s) == (None, None)


def test_the_ring_pages_by_cursor_and_counts_what_it_dropped() -> None:
    ring = RecordRing(capacity=3)
    assert ring.since(0).next_cursor == 0
    for _ in range(5):
        ring.add(Timeline(1.0, 1.0).record(ENDING, 2.0))
    page = ring.since(0)
    assert ([r.sequence for r in page.records], page.next_cursor, page.num_dropped) == ([3, 4, 5], 5, 2)
    page = ring.since(4)
    assert ([r.sequence for r in page.records], page.num_dropped) == ([5], 0)
    assert ring.since(5).records == ()
    assert [r.sequence for r in ring.since(99).records] == [3, 4, 5]


FULL = RequestRecord(
    sequence=0,
    request_id="r" * 128 + "-12345",
    arrival_unix_s=1_790_000_000.123456,
    finished_unix_s=1_790_000_001.654321,
    outcome=RequestOutcome.SUCCEEDED,
    prompt_tokens=2**31,
    output_tokens=3,
    queue_s=0.1,
    ttft_s=0.2,
    tpot_s=0.3,
    max_itl_s=0.4,
    duration_s=0.5,
    mean_batch_size=6.5,
    mean_step_s=0.7,
)
OPTIONAL = ("queue_s", "ttft_s", "tpot_s", "max_itl_s", "mean_batch_size", "mean_step_s")


@pytest.mark.parametrize("outcome", RequestOutcome)
def test_the_ring_gives_back_what_it_was_given(outcome: RequestOutcome) -> None:
    ring, added = RecordRing(), []
    for absent in itertools.chain.from_iterable(
        itertools.combinations(OPTIONAL, n) for n in range(len(OPTIONAL) + 1)
    ):
        record = dataclasses.replace(FULL, outcome=outcome, **dict.fromkeys(absent))
        ring.add(record)
        added.append(dataclasses.replace(record, sequence=len(added) + 1))
    assert ring.since(0).records == tuple(added)


def test_a_filling_ring_takes_no_memory() -> None:
    ring = RecordRing(capacity=2000)
    ring.add(FULL)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for index in range(2000):
            ring.add(dataclasses.replace(FULL, request_id=f"r-{index}"))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 10_000
