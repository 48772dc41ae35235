"""The block allocator: no block is lost, shared or given twice, and the pool can be filled."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from trimtab.engine.embedded.blocks import BlockAllocator

NUM_BLOCKS, BLOCK_SIZE = 23, 4


class AllocatorMachine(RuleBasedStateMachine):
    """Random growing, shrinking and releasing, against a model that remembers token counts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockAllocator(NUM_BLOCKS, BLOCK_SIZE)
        self.tokens: dict[int, int] = {}

    @rule(sequence_id=st.integers(0, 7), num_tokens=st.integers(1, 120))
    def grow(self, sequence_id: int, num_tokens: int) -> None:
        before, free = self.blocks.table(sequence_id), self.blocks.num_free
        wanted = max(num_tokens, self.tokens.get(sequence_id, 0))
        fits = -(-wanted // BLOCK_SIZE) - len(before) <= free
        assert self.blocks.grow(sequence_id, wanted) == fits
        if fits:
            self.tokens[sequence_id] = wanted
            assert self.blocks.table(sequence_id)[: len(before)] == before
        else:
            assert (self.blocks.table(sequence_id), self.blocks.num_free) == (before, free)

    @rule(sequence_id=st.integers(0, 7), num_tokens=st.integers(0, 120))
    def shrink(self, sequence_id: int, num_tokens: int) -> None:
        self.blocks.shrink(sequence_id, num_tokens)
        if sequence_id in self.tokens:
            self.tokens[sequence_id] = min(self.tokens[sequence_id], num_tokens)

    @rule(sequence_id=st.integers(0, 7))
    def release(self, sequence_id: int) -> None:
        self.blocks.release(sequence_id)
        self.tokens.pop(sequence_id, None)

    @invariant()
    def every_block_is_free_or_in_one_table(self) -> None:
        tables = [self.blocks.table(i) for i in range(8)]
        held = [block for table in tables for block in table]
        assert len(held) == len(set(held)) == self.blocks.num_used
        assert set(held) <= set(range(NUM_BLOCKS))
        assert self.blocks.num_free + len(held) == NUM_BLOCKS
        for sequence_id, num_tokens in self.tokens.items():
            assert len(tables[sequence_id]) == -(-num_tokens // BLOCK_SIZE)


AllocatorMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
test_no_block_is_lost_or_shared = AllocatorMachine.TestCase


def test_ninety_five_percent_of_the_pool_holds_tokens_of_sequences_of_random_lengths() -> None:
    ratios = []
    for seed in range(20):
        rng = random.Random(seed)
        blocks, stored = BlockAllocator(1450, 16), 0
        while True:
            num_tokens = min(8192, max(1, round(rng.lognormvariate(5.545, 0.8))))  # median 256 tokens
            if not blocks.grow(stored_id := len(ratios) * 10_000 + stored, num_tokens):
                # The last one stores what still fits: it is prefilled and decoded into the rest of the pool.
                rest = min(num_tokens, blocks.num_free * 16)
                assert blocks.grow(stored_id, rest)
                stored += rest
                break
            stored += num_tokens
        ratios.append(stored / blocks.capacity_tokens)
    print(f"usable share of the pool: min {min(ratios):.3f}, mean {sum(ratios) / len(ratios):.3f}")
    assert min(ratios) >= 0.95


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="0 blocks"):
        BlockAllocator(0, 16)
