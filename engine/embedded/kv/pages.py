"""Pages and their parts: which bytes of the pool are free.

A page holds one full block, or a fixed number of int8 or int4 blocks, and belongs to one type while any of them is in
use. The block allocator calls it. Pure Python.
"""

from __future__ import annotations

from collections.abc import Mapping

from trimtab.kernels.kv_cache import BlockSlot, KVType


class Pages:
    """A free list of pages, and for each compressed type the pages that have parts to spare.

    Sizes are counted in units: the smallest part that a page can be cut into, so that shares of the pool are exact
    whole numbers.
    """

    def __init__(self, num_pages: int, blocks_per_page: Mapping[KVType, int]) -> None:
        """``blocks_per_page`` says how many blocks of each usable type fit a page; each divides the largest."""
        self.num_pages = num_pages
        self._blocks_per_page = dict(blocks_per_page)
        self.units_per_page = max(self._blocks_per_page.values())
        # Popped from the end: pages freed lately are used first, while they are still in the CPU's cache.
        self._free = list(range(num_pages - 1, -1, -1))
        self._spare: dict[KVType, dict[int, list[int]]] = {kv_type: {} for kv_type in self._blocks_per_page}
        self.num_used_units = 0

    @property
    def num_units(self) -> int:
        return self.num_pages * self.units_per_page

    @property
    def num_free_pages(self) -> int:
        return len(self._free)

    def holds(self, kv_type: KVType) -> bool:
        """Whether this pool has room set aside for blocks of this type at all."""
        return kv_type in self._blocks_per_page

    def units(self, kv_type: KVType) -> int:
        """Units that one block of this type takes."""
        return self.units_per_page // self._blocks_per_page[kv_type]

    def num_available(self, kv_type: KVType) -> int:
        """How many blocks of this type could be taken now."""
        spare = sum(len(parts) for parts in self._spare[kv_type].values())
        return len(self._free) * self._blocks_per_page[kv_type] + spare

    def take(self, kv_type: KVType) -> BlockSlot | None:
        """A free place for one block; ``None`` when there is none."""
        per_page, spare = self._blocks_per_page[kv_type], self._spare[kv_type]
        if spare:
            page, parts = next(iter(spare.items()))
            part = parts.pop()
            if not parts:
                del spare[page]
        elif self._free:
            page, part = self._free.pop(), 0
            if per_page > 1:
                spare[page] = list(range(per_page - 1, 0, -1))
        else:
            return None
        self.num_used_units += self.units(kv_type)
        return BlockSlot(kv_type, page * per_page + part)

    def give_back(self, slot: BlockSlot) -> None:
        """Frees a place that ``take`` gave."""
        per_page, spare = self._blocks_per_page[slot.kv_type], self._spare[slot.kv_type]
        page, part = divmod(slot.number, per_page)
        parts = spare.setdefault(page, [])
        parts.append(part)
        if len(parts) == per_page:
            del spare[page]
            self._free.append(page)
        self.num_used_units -= self.units(slot.kv_type)
