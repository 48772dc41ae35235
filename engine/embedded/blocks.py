"""The block allocator: which KV blocks belong to which sequence.

Paged attention (Kwon et al., 2023, arXiv:2309.06180) stores a sequence's keys and values in fixed-size blocks from
one preallocated pool, so that memory is lost only in each sequence's last block. This module keeps the books; the
tensor is in ``kv_pool``. The scheduler calls it. Pure Python, one thread.
"""

from __future__ import annotations


class BlockAllocator:
    """A free list and one block table for each sequence, keyed by the sequence's id."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"a pool needs a block and a token in it, not {num_blocks} blocks of {block_size} tokens"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Popped from the end: recently freed blocks are reused first, while they are still in the CPU's cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._tables: dict[int, list[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def usage_ratio(self) -> float:
        return self.num_used / self.num_blocks

    @property
    def capacity_tokens(self) -> int:
        """The most tokens that one sequence alone could hold."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def table(self, sequence_id: int) -> tuple[int, ...]:
        """The sequence's blocks in token order; empty when it holds none."""
        return tuple(self._tables.get(sequence_id, ()))

    def grow(self, sequence_id: int, num_tokens: int) -> bool:
        """Gives the sequence the blocks for ``num_tokens`` tokens, or changes nothing and returns ``False``."""
        table = self._tables.get(sequence_id, [])
        num_missing = self.blocks_for(num_tokens) - len(table)
        if num_missing > len(self._free):
            return False
        if num_missing > 0:
            table.extend(self._free.pop() for _ in range(num_missing))
            self._tables[sequence_id] = table
        return True

    def shrink(self, sequence_id: int, num_tokens: int) -> None:
        """Takes back the blocks beyond ``num_tokens`` tokens."""
        table = self._tables.get(sequence_id, [])
        num_kept = self.blocks_for(num_tokens)
        while len(table) > num_kept:
            self._free.append(table.pop())

    def release(self, sequence_id: int) -> None:
        """Takes back all of the sequence's blocks. Harmless when it holds none."""
        self._free.extend(reversed(self._tables.pop(sequence_id, [])))
