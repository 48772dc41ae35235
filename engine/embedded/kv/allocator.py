"""The block allocator: which KV blocks belong to which sequence, and what must move before the next step.

Paged attention (Kwon et al., 2023, arXiv:2309.06180) stores a sequence's keys and values in fixed-size blocks from
one preallocated pool, so that memory is lost only in each sequence's last block. Blocks are shared between sequences
with a common prefix, and copied before one of them would write into a shared one. Under pressure blocks can be
compressed or swapped out. This module keeps the books and lists the moves; the bytes are in ``kv.pool``, which
carries the moves out in order before the step. The scheduler calls it. Pure Python, one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trimtab.engine.embedded.kv.block import Block, Move, MoveKind
from trimtab.engine.embedded.kv.pages import Pages
from trimtab.engine.embedded.kv.prefix_cache import PrefixCache, chained_key, root_key
from trimtab.kernels.kv_cache import BlockSlot, KVType


class BlockAllocator:
    """A block table for each sequence, keyed by the sequence's id.

    ``caching`` says whether new sequences look for and leave cached prefixes. ``usable_ratio`` is the share of the
    pool that sequences may own; both may be changed between any two steps.
    """

    def __init__(
        self, pages: Pages, block_size: int, write_type: KVType = KVType.FULL, swap: Pages | None = None
    ) -> None:
        """``write_type``: how new tokens are stored. ``swap``: the swap space; ``None``: nothing can be swapped."""
        if pages.num_pages < 1 or block_size < 1:
            raise ValueError(
                f"a pool needs a page and a token in it, not {pages.num_pages} pages of {block_size} tokens"
            )
        self.block_size = block_size
        self.prefixes = PrefixCache()
        self._pages = pages
        self._write_type = write_type
        self._usable_units = pages.num_units
        self._caching = False
        self._idle_units = 0
        self._num_made = 0
        self._tables: dict[int, list[Block]] = {}
        self._keys: dict[int, list[bytes]] = {}  # of each sequence's complete blocks; absent: it leaves no prefix
        self._roots: dict[int, bytes] = {}
        self._swap = swap
        self._swapped: dict[int, list[BlockSlot]] = {}
        self._moves: list[Move] = []

    @property
    def units_per_page(self) -> int:
        return self._pages.units_per_page

    @property
    def num_used_units(self) -> int:
        """Units of the pool that sequences own or cached prefixes lie in."""
        return self._pages.num_used_units

    @property
    def owned_units(self) -> int:
        """Units of the pool that sequences own; idle cached prefixes do not count."""
        return self._pages.num_used_units - self._idle_units

    @property
    def usage_ratio(self) -> float:
        """Owned share of what is usable: above 1 after the usable pool has shrunk below what is owned."""
        return self.owned_units / self._usable_units

    @property
    def capacity_tokens(self) -> int:
        """The most tokens that one sequence alone could hold in the usable pool."""
        return self._usable_units // self._pages.units(self._write_type) * self.block_size

    @property
    def caching(self) -> bool:
        return self._caching

    @caching.setter
    def caching(self, wanted: bool) -> None:
        if self._caching and not wanted:
            self.forget_prefixes()
        self._caching = wanted

    def forget_prefixes(self) -> None:
        """Nobody finds a prefix that was computed until now."""
        for block in self.prefixes.forget_all():
            self._pages.give_back(block.slot)
        self._idle_units = 0
        self._keys.clear()
        self._roots.clear()

    def set_usable_ratio(self, ratio: float) -> None:
        """Lets sequences own ``ratio`` of the pool, at least one page. What they own beyond it stays theirs."""
        self._usable_units = max(self._pages.units_per_page, int(self._pages.num_units * ratio))
        self._trim(0)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def share_of(self, num_tokens: int) -> float:
        """What share of the usable pool new blocks for ``num_tokens`` tokens take."""
        return self.blocks_for(num_tokens) * self._pages.units(self._write_type) / self._usable_units

    def table(self, sequence_id: int) -> tuple[BlockSlot, ...]:
        """Where the sequence's blocks lie, in token order; empty when it holds none."""
        return tuple(block.slot for block in self._tables.get(sequence_id, ()))

    def held_tokens(self, sequence_id: int) -> float:
        """The sequence's part of the pool, in tokens as they are written now; a shared block counts in parts."""
        table, units = self._tables.get(sequence_id, ()), self._pages.units
        owned = sum(units(block.slot.kv_type) / block.num_owners for block in table)
        return owned / units(self._write_type) * self.block_size

    def admit(
        self, sequence_id: int, token_ids: Sequence[int], salt: str, *, reuse: bool = True, beyond: bool = False
    ) -> int | None:
        """Gives a new sequence the blocks for all of its tokens, cached ones first.

        Args:
            sequence_id: A sequence without blocks.
            token_ids: Everything that it holds so far.
            salt: Only prefixes of the same salt are found.
            reuse: Whether cached prefixes may stand for computing them.
            beyond: Whether it may own more than the usable share.

        Returns:
            How many leading tokens need no computing (at least one is left to compute), or ``None``: there is no
            room, and nothing has changed but idle prefixes.
        """
        root = root_key(salt)
        keys, found = self._find(token_ids, root) if self._caching and reuse else ([], [])
        whole = bool(found) and len(found) * self.block_size == len(token_ids)
        num_new = self.blocks_for(len(token_ids)) - len(found) + whole
        woken_units = sum(self._pages.units(b.slot.kv_type) for b in found if b.num_owners == 0)
        if not beyond and self._exceeds(num_new, woken_units):
            return None
        for block in found:
            self._own(block)
        if not self._reserve(num_new):
            for block in reversed(found):
                self._disown(block)
            return None
        table = list(found)
        if whole:
            # Its last token must be computed to know what follows, and would be written into a shared block.
            shared, copy = table.pop(), self._new_block()
            self._moves.append(Move(MoveKind.COPY, shared.slot, copy.slot))
            self._disown(shared)
            table.append(copy)
            keys.pop()
            num_new -= 1
        table += (self._new_block() for _ in range(num_new))
        self._tables[sequence_id] = table
        if self._caching:
            self._keys[sequence_id], self._roots[sequence_id] = keys, root
        return min(len(found) * self.block_size, len(token_ids) - 1)

    def grow(self, sequence_id: int, num_tokens: int, *, beyond: bool = False) -> bool:
        """Gives the sequence the blocks for ``num_tokens`` tokens, or gives it none and returns ``False``."""
        table = self._tables.get(sequence_id, [])
        num_missing = self.blocks_for(num_tokens) - len(table)
        if num_missing <= 0:
            return True
        if (not beyond and self._exceeds(num_missing, 0)) or not self._reserve(num_missing):
            return False
        table.extend(self._new_block() for _ in range(num_missing))
        self._tables[sequence_id] = table
        return True

    def shrink(self, sequence_id: int, num_tokens: int) -> None:
        """Takes back the blocks beyond ``num_tokens`` tokens."""
        table = self._tables.get(sequence_id, [])
        while len(table) > self.blocks_for(num_tokens):
            self._disown(table.pop())

    def release(self, sequence_id: int) -> None:
        """Takes back all that the sequence holds, swapped or not. Harmless when it holds nothing."""
        self._release_table(sequence_id)
        self._keys.pop(sequence_id, None)
        self._roots.pop(sequence_id, None)
        self._drop_swapped(self._swapped.pop(sequence_id, ()))

    def publish(self, sequence_id: int, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Lets others find the sequence's complete blocks; call it when tokens have been computed."""
        keys = self._keys.get(sequence_id)
        if keys is None:
            return
        size = self.block_size
        while (len(keys) + 1) * size <= num_computed_tokens:
            at = len(keys)
            parent = keys[-1] if keys else self._roots[sequence_id]
            keys.append(chained_key(parent, token_ids[at * size : (at + 1) * size]))
            self.prefixes.add(keys[-1], self._tables[sequence_id][at])

    def compress(self, computed: Iterable[tuple[int, int]], max_blocks: int) -> int:
        """Compresses complete blocks to int8, each sequence's oldest first; returns how many.

        ``computed`` has the id and the number of computed tokens of the sequences whose blocks may be taken, in the
        order in which they are.
        """
        if self._write_type is not KVType.FULL or not self._pages.holds(KVType.INT8):
            return 0
        num_compressed = 0
        for sequence_id, num_tokens in computed:
            for block in self._tables[sequence_id][: num_tokens // self.block_size]:
                if block.slot.kv_type is not KVType.FULL:
                    continue
                if num_compressed == max_blocks:
                    return num_compressed
                # Given back first, its own page may be where it goes: a full pool can be compressed too.
                source = block.slot
                self._pages.give_back(source)
                block.slot = self._take(KVType.INT8)
                self._moves.append(Move(MoveKind.COPY, source, block.slot))
                num_compressed += 1
        return num_compressed

    def swap_out(self, sequence_id: int, num_computed_tokens: int) -> bool:
        """Moves the sequence's computed blocks to the swap space, or changes nothing and returns ``False``."""
        kept = self._tables.get(sequence_id, [])[: self.blocks_for(num_computed_tokens)]
        if self._swap is None or not kept:
            return False
        places = _take_all(self._swap, [block.slot.kv_type for block in kept])
        if places is None:
            return False
        self._moves += (Move(MoveKind.SWAP_OUT, block.slot, place) for block, place in zip(kept, places, strict=True))
        self._swapped[sequence_id] = places
        self._release_table(sequence_id)
        return True

    def is_swapped(self, sequence_id: int) -> bool:
        return sequence_id in self._swapped

    def swap_in(self, sequence_id: int, num_tokens: int, *, beyond: bool = False) -> bool:
        """Brings a swapped sequence back, with blocks for ``num_tokens`` tokens; ``False``: there is no room."""
        places = self._swapped[sequence_id]
        num_new = self.blocks_for(num_tokens) - len(places)
        types = [place.kv_type for place in places] + [self._write_type] * num_new
        if not beyond and self._exceeds(num_new, sum(self._pages.units(place.kv_type) for place in places)):
            return False
        slots = _take_all(self._pages, types)
        while slots is None and self._evict():
            slots = _take_all(self._pages, types)
        if slots is None:
            return False
        self._moves += (Move(MoveKind.SWAP_IN, place, slot) for place, slot in zip(places, slots, strict=False))
        self._drop_swapped(self._swapped.pop(sequence_id))
        self._tables[sequence_id] = [self._block_at(slot) for slot in slots]
        return True

    def take_moves(self) -> list[Move]:
        """What must move before the next step, in order. The caller carries it out."""
        moves, self._moves = self._moves, []
        return moves

    def _find(self, token_ids: Sequence[int], root: bytes) -> tuple[list[bytes], list[Block]]:
        """The keys and blocks of the longest cached prefix of whole blocks."""
        keys: list[bytes] = []
        found: list[Block] = []
        for start in range(0, len(token_ids) - self.block_size + 1, self.block_size):
            key = chained_key(keys[-1] if keys else root, token_ids[start : start + self.block_size])
            block = self.prefixes.find(key)
            if block is None:
                break
            keys.append(key)
            found.append(block)
        return keys, found

    def _exceeds(self, num_new: int, other_units: int) -> bool:
        wanted = num_new * self._pages.units(self._write_type) + other_units
        return self.owned_units + wanted > self._usable_units

    def _reserve(self, num_blocks: int) -> bool:
        """Evicts idle prefixes until ``num_blocks`` blocks can be taken."""
        pages, kv_type = self._pages, self._write_type
        wanted_units = num_blocks * pages.units(kv_type)
        if wanted_units > pages.num_units - self.owned_units:
            return False
        self._trim(wanted_units)
        while pages.num_available(kv_type) < num_blocks:
            if not self._evict():
                return False
        return True

    def _trim(self, coming_units: int) -> None:
        """Evicts idle prefixes until what is used and what is coming keep within the usable pool."""
        while self._pages.num_used_units + coming_units > self._usable_units and self._evict():
            pass

    def _evict(self) -> bool:
        block = self.prefixes.give_up()
        if block is None:
            return False
        self._idle_units -= self._pages.units(block.slot.kv_type)
        self._pages.give_back(block.slot)
        return True

    def _new_block(self) -> Block:
        return self._block_at(self._take(self._write_type))

    def _take(self, kv_type: KVType) -> BlockSlot:
        slot = self._pages.take(kv_type)
        assert slot is not None, "there is room for what is taken one by one"
        return slot

    def _block_at(self, slot: BlockSlot) -> Block:
        self._num_made += 1
        return Block(slot, self._num_made)

    def _own(self, block: Block) -> None:
        if block.num_owners == 0:
            self.prefixes.wake(block)
            self._idle_units -= self._pages.units(block.slot.kv_type)
        block.num_owners += 1

    def _disown(self, block: Block) -> None:
        block.num_owners -= 1
        if block.num_owners > 0:
            return
        if block.key is None:
            self._pages.give_back(block.slot)
        else:
            self.prefixes.rest(block)
            self._idle_units += self._pages.units(block.slot.kv_type)
            self._trim(0)

    def _release_table(self, sequence_id: int) -> None:
        # The tail rests first: a prefix without its end is still of use, an end without its beginning is not.
        for block in reversed(self._tables.pop(sequence_id, [])):
            self._disown(block)

    def _drop_swapped(self, places: Iterable[BlockSlot]) -> None:
        for place in places:
            assert self._swap is not None, "only a swap space gives places"
            self._swap.give_back(place)


def _take_all(pages: Pages, types: Sequence[KVType]) -> list[BlockSlot] | None:
    """Places for blocks of these types, or ``None`` and nothing taken."""
    taken: list[BlockSlot] = []
    for kv_type in types:
        slot = pages.take(kv_type)
        if slot is None:
            for given in reversed(taken):
                pages.give_back(given)
            return None
        taken.append(slot)
    return taken
