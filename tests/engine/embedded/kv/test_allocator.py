"""The block allocator, against a model of the memory: every sequence finds its own tokens where its table says."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trimtab.engine.embedded.kv.allocator import BlockAllocator
from trimtab.engine.embedded.kv.block import MoveKind
from trimtab.engine.embedded.kv.pages import Pages
from trimtab.kernels.kv_cache import BlockSlot, KVType

BLOCK_SIZE, NUM_PAGES, NUM_SWAP_PAGES = 4, 9, 5
TYPES = {
    "auto, fp32": (KVType.FULL, {KVType.FULL: 1, KVType.INT8: 4}),
    "auto, bf16": (KVType.FULL, {KVType.FULL: 1, KVType.INT8: 2}),
    "int8": (KVType.INT8, {KVType.INT8: 1}),
}

Content = tuple[int, ...]  # the tokens from the sequence's beginning to the end of the block that is stored


class Memory:
    """Units of pages, each of which remembers which block was last written over it."""

    def __init__(self, num_pages: int, per_page: dict[KVType, int]) -> None:
        self.per_page = per_page
        self.units_per_page = max(per_page.values())
        self.units: list[tuple[KVType, Content] | None] = [None] * (num_pages * self.units_per_page)

    def covered(self, slot: BlockSlot) -> range:
        num_units = self.units_per_page // self.per_page[slot.kv_type]
        return range(slot.number * num_units, (slot.number + 1) * num_units)

    def write(self, slot: BlockSlot, content: Content) -> None:
        for unit in self.covered(slot):
            self.units[unit] = (slot.kv_type, content)

    def read(self, slot: BlockSlot) -> Content:
        found = {self.units[unit] for unit in self.covered(slot)}
        assert len(found) == 1, "a part of the block was overwritten"
        entry = found.pop()
        assert entry is not None
        assert entry[0] is slot.kv_type
        return entry[1]


@dataclass
class Model:
    """What one sequence must find in the pool."""

    tokens: list[int]
    salt: str
    num_computed: int = 0
    cached: set[int] = field(default_factory=set)


class AllocatorMachine(RuleBasedStateMachine):
    """Everything that the scheduler may ask for, in any order; now and then the moves are carried out."""

    @initialize(types=st.sampled_from(sorted(TYPES)), seed=st.integers(0, 10_000))
    def start(self, types: str, seed: int) -> None:
        write_type, per_page = TYPES[types]
        self.rng = random.Random(seed)
        self.pages, self.swap_pages = Pages(NUM_PAGES, per_page), Pages(NUM_SWAP_PAGES, per_page)
        self.blocks = BlockAllocator(self.pages, BLOCK_SIZE, write_type, self.swap_pages)
        self.pool, self.swap = Memory(NUM_PAGES, per_page), Memory(NUM_SWAP_PAGES, per_page)
        self.running: dict[int, Model] = {}
        self.swapped: dict[int, Model] = {}
        self.next_id = 0

    @rule(wanted=st.booleans())
    def turn_the_prefix_cache(self, wanted: bool) -> None:
        self.blocks.caching = wanted

    @rule(ratio=st.floats(0.1, 1.0))
    def change_the_usable_pool(self, ratio: float) -> None:
        self.blocks.set_usable_ratio(ratio)

    @rule(prefix=st.integers(0, 3), num_tokens=st.integers(1, 24), salt=st.sampled_from("ab"), beyond=st.booleans())
    def admit(self, prefix: int, num_tokens: int, salt: str, beyond: bool) -> None:
        # Prompts share beginnings of several lengths and then differ.
        tokens = [7] * min(4 * prefix, num_tokens)
        tokens += [self.rng.choice([7, 8]) for _ in range(num_tokens - len(tokens))]
        usage_before = self.blocks.usage_ratio
        num_cached = self.blocks.admit(self.next_id, tokens, salt, beyond=beyond)
        if num_cached is None:
            assert self.blocks.usage_ratio == usage_before
            return
        assert 0 <= num_cached < num_tokens
        assert beyond or self.blocks.usage_ratio <= 1
        self.running[self.next_id] = Model(tokens, salt, num_cached)
        self.next_id += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(1, 9), num_drafts=st.integers(0, 5))
    def compute(self, data: st.DataObject, num_tokens: int, num_drafts: int) -> None:
        """One step of one sequence: its next tokens and some drafts, of which some stay."""
        self.carry_out()
        sequence_id = data.draw(st.sampled_from(sorted(self.running)))
        model = self.running[sequence_id]
        num_tokens = min(num_tokens, len(model.tokens) - model.num_computed)
        completes = model.num_computed + num_tokens == len(model.tokens)
        drafts: list[int] = []
        if completes and self.blocks.grow(sequence_id, len(model.tokens) + num_drafts):
            drafts = [self.rng.choice([7, 8]) for _ in range(num_drafts)]
        fed = (model.tokens + drafts)[: model.num_computed + num_tokens + len(drafts)]
        self.store(sequence_id, fed, model.num_computed)
        num_kept = self.rng.randint(0, len(drafts))
        model.num_computed += num_tokens + num_kept
        model.tokens += drafts[:num_kept]
        self.blocks.shrink(sequence_id, len(model.tokens))
        self.blocks.publish(sequence_id, model.tokens, model.num_computed)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), beyond=st.booleans())
    def append(self, data: st.DataObject, beyond: bool) -> None:
        sequence_id = data.draw(st.sampled_from(sorted(self.running)))
        model = self.running[sequence_id]
        before = self.blocks.table(sequence_id)
        if self.blocks.grow(sequence_id, len(model.tokens) + 1, beyond=beyond):
            model.tokens.append(self.rng.choice([7, 8]))
            assert self.blocks.table(sequence_id)[: len(before)] == before
        else:
            assert self.blocks.table(sequence_id) == before

    @rule(max_blocks=st.integers(1, 6))
    def compress(self, max_blocks: int) -> None:
        used = self.blocks.owned_units
        computed = [(i, m.num_computed) for i, m in self.running.items()]
        num_compressed = self.blocks.compress(computed, max_blocks)
        assert num_compressed <= max_blocks
        assert (self.blocks.owned_units < used) == (num_compressed > 0)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        sequence_id = data.draw(st.sampled_from(sorted(self.running)))
        before = self.blocks.table(sequence_id)
        if self.blocks.swap_out(sequence_id, self.running[sequence_id].num_computed):
            self.swapped[sequence_id] = self.running.pop(sequence_id)
            assert not self.blocks.table(sequence_id)
        else:
            assert self.blocks.table(sequence_id) == before

    @precondition(lambda self: self.swapped)
    @rule(data=st.data(), beyond=st.booleans())
    def swap_in(self, data: st.DataObject, beyond: bool) -> None:
        sequence_id = data.draw(st.sampled_from(sorted(self.swapped)))
        if self.blocks.swap_in(sequence_id, len(self.swapped[sequence_id].tokens), beyond=beyond):
            self.running[sequence_id] = self.swapped.pop(sequence_id)

    @precondition(lambda self: self.running or self.swapped)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sequence_id = data.draw(st.sampled_from(sorted(self.running | self.swapped)))
        self.blocks.release(sequence_id)
        self.running.pop(sequence_id, None)
        self.swapped.pop(sequence_id, None)

    def store(self, sequence_id: int, fed: list[int], first: int) -> None:
        """What the model's pass writes: the blocks of the fed tokens from ``first`` on."""
        table = self.blocks.table(sequence_id)
        for at in range(first // BLOCK_SIZE, -(-len(fed) // BLOCK_SIZE)):
            self.pool.write(table[at], tuple(fed[: (at + 1) * BLOCK_SIZE]))

    @rule()
    def carry_out(self) -> None:
        for move in self.blocks.take_moves():
            source = self.swap if move.kind is MoveKind.SWAP_IN else self.pool
            target = self.swap if move.kind is MoveKind.SWAP_OUT else self.pool
            target.write(move.target, source.read(move.source))
        for sequence_id, model in self.running.items():
            table = self.blocks.table(sequence_id)
            for at in range(-(-model.num_computed // BLOCK_SIZE)):
                length = min((at + 1) * BLOCK_SIZE, model.num_computed)
                assert self.pool.read(table[at])[:length] == tuple(model.tokens[:length])

    @invariant()
    def every_unit_has_at_most_one_block_and_all_are_accounted_for(self) -> None:
        if not hasattr(self, "blocks"):
            return
        owned = {slot for i in self.running for slot in self.blocks.table(i)}
        idle = {block.slot for block in self.blocks.prefixes.idle}
        assert not owned & idle
        covered = [unit for slot in owned | idle for unit in self.pool.covered(slot)]
        assert len(covered) == len(set(covered)) == self.pages.num_used_units
        assert sum(len(self.pool.covered(slot)) for slot in owned) == self.blocks.owned_units
        for sequence_id, model in self.running.items():
            assert len(self.blocks.table(sequence_id)) == self.blocks.blocks_for(len(model.tokens))
        if not self.swapped:
            assert self.swap_pages.num_used_units == 0

    def teardown(self) -> None:
        if not hasattr(self, "blocks"):
            return
        for sequence_id in [*self.running, *self.swapped]:
            self.blocks.release(sequence_id)
        assert self.blocks.owned_units == 0
        self.blocks.caching = True
        self.blocks.caching = False
        assert self.pages.num_free_pages == NUM_PAGES
        assert self.swap_pages.num_free_pages == NUM_SWAP_PAGES


AllocatorMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
test_every_sequence_finds_its_own_tokens = AllocatorMachine.TestCase


def allocator(num_pages: int = 16, block_size: int = 4) -> BlockAllocator:
    blocks = BlockAllocator(Pages(num_pages, {KVType.FULL: 1, KVType.INT8: 2}), block_size)
    blocks.caching = True
    return blocks


def admit_and_compute(blocks: BlockAllocator, sequence_id: int, tokens: list[int], salt: str = "") -> int | None:
    num_cached = blocks.admit(sequence_id, tokens, salt)
    blocks.publish(sequence_id, tokens, len(tokens))
    return num_cached


def test_a_prefix_is_shared_while_and_after_its_owner_runs_but_not_across_salts() -> None:
    blocks = allocator()
    prompt = list(range(10))
    assert admit_and_compute(blocks, 1, prompt) == 0
    assert admit_and_compute(blocks, 2, [*prompt[:8], 99, 98]) == 8
    assert blocks.table(1)[:2] == blocks.table(2)[:2]
    assert admit_and_compute(blocks, 3, prompt, "another tenant") == 0
    blocks.release(1)
    blocks.release(2)
    assert admit_and_compute(blocks, 4, prompt) == 8


def test_a_prompt_that_is_cached_whole_copies_its_last_block_and_computes_one_token() -> None:
    blocks = allocator()
    prompt = list(range(8))
    admit_and_compute(blocks, 1, prompt)
    assert blocks.admit(2, prompt, "") == 7
    (move,) = blocks.take_moves()
    assert (move.source, move.target) == (blocks.table(1)[1], blocks.table(2)[1])
    assert blocks.table(1)[0] == blocks.table(2)[0]


def test_the_prefix_used_least_recently_is_evicted_first_and_each_from_its_tail() -> None:
    blocks = allocator(num_pages=6)
    old, new = list(range(12)), list(range(100, 112))
    for sequence_id, prompt in enumerate((old, new)):
        admit_and_compute(blocks, sequence_id, prompt)
        blocks.release(sequence_id)
    assert blocks.admit(10, [500, 501, 502, 503, 504], "") == 0  # two blocks: the tail of the old prefix goes
    assert (
        admit_and_compute(blocks, 11, old) == 4
    )  # its head was left; its two new blocks are the tail of the new one
    blocks.release(10)
    assert admit_and_compute(blocks, 12, [*new[:8], 1]) == 4


def test_compressing_halves_what_complete_blocks_take_and_all_owners_see_it() -> None:
    blocks = allocator()
    prompt = list(range(9))
    admit_and_compute(blocks, 1, prompt)
    admit_and_compute(blocks, 2, [*prompt[:8], 50])
    owned = blocks.owned_units
    assert blocks.compress([(1, 9)], max_blocks=10) == 2
    assert blocks.owned_units == owned - 2
    assert [s.kv_type for s in blocks.table(2)] == [KVType.INT8, KVType.INT8, KVType.FULL]
    assert blocks.table(1)[:2] == blocks.table(2)[:2]


def test_shrinking_the_usable_pool_takes_nothing_from_anybody_and_admits_nobody() -> None:
    blocks = allocator(num_pages=10)
    assert blocks.admit(1, list(range(24)), "") == 0
    table = blocks.table(1)
    blocks.set_usable_ratio(0.5)
    assert blocks.table(1) == table
    assert blocks.usage_ratio == pytest.approx(6 / 5)
    assert blocks.admit(2, [1], "") is None
    assert blocks.grow(1, 25) is False
    assert blocks.grow(1, 25, beyond=True)
    blocks.set_usable_ratio(1.0)
    assert blocks.admit(2, [1], "") == 0


def test_ninety_five_percent_of_the_pool_holds_tokens_of_sequences_of_random_lengths() -> None:
    ratios = []
    for seed in range(20):
        rng = random.Random(seed)
        blocks, stored = allocator(1450, 16), 0
        for sequence_id in range(10_000):
            num_tokens = min(8192, max(1, round(rng.lognormvariate(5.545, 0.8))))  # median 256 tokens
            if not blocks.grow(sequence_id, num_tokens):
                # The last one stores what still fits: it is prefilled and decoded into the rest of the pool.
                rest = min(num_tokens, (1450 - blocks.owned_units // 2) * 16)
                assert blocks.grow(sequence_id, rest)
                stored += rest
                break
            stored += num_tokens
        ratios.append(stored / blocks.capacity_tokens)
    print(f"usable share of the pool: min {min(ratios):.3f}, mean {sum(ratios) / len(ratios):.3f}")
    assert min(ratios) >= 0.95


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="0 pages"):
        BlockAllocator(Pages(0, {KVType.FULL: 1}), 16)
