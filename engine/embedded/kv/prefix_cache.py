"""The prefix cache's index: which blocks hold the keys and values of which prefixes.

A block's key is a hash over its tokens and the key of the block before it, so one look-up a block finds the longest
known prefix (as in vLLM's automatic prefix caching). The first key is made of the request's salt: who does not know
the salt can neither use nor time another tenant's prompts. SHA-256, so that nobody can make two prefixes collide.

The block allocator owns the index; it decides when blocks enter, and asks for the next one to give up.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from trimtab.engine.embedded.kv.block import Block


def root_key(salt: str) -> bytes:
    """What the first block's key is chained to."""
    return hashlib.sha256(b"trimtab prefix cache\0" + salt.encode("utf-8", "surrogatepass")).digest()


def chained_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of the block of ``token_ids`` that follows the block with key ``parent``."""
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


class PrefixCache:
    """Blocks by key. Those that no sequence owns wait, least recently used first, to be given up."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, Block] = {}
        self._idle: OrderedDict[int, Block] = OrderedDict()

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def idle(self) -> list[Block]:
        """Blocks that no sequence owns, the next to be given up first."""
        return list(self._idle.values())

    def find(self, key: bytes) -> Block | None:
        return self._blocks.get(key)

    def add(self, key: bytes, block: Block) -> None:
        """Lets others find ``block``. Where the key is known already, the first block stays the known one."""
        if block.key is None and key not in self._blocks:
            block.key = key
            self._blocks[key] = block

    def wake(self, block: Block) -> None:
        """The block has an owner again."""
        self._idle.pop(block.number, None)

    def rest(self, block: Block) -> None:
        """The block, which the index knows, has lost its last owner."""
        self._idle[block.number] = block

    def give_up(self) -> Block | None:
        """Forgets the idle block that was used least recently and returns it; ``None`` when none is idle."""
        if not self._idle:
            return None
        _, block = self._idle.popitem(last=False)
        self.forget(block)
        return block

    def forget(self, block: Block) -> None:
        """Nobody finds the block any more."""
        if block.key is not None:
            del self._blocks[block.key]
            block.key = None
        self._idle.pop(block.number, None)

    def forget_all(self) -> list[Block]:
        """Forgets everything; returns the blocks that were idle."""
        idle = self.idle
        for block in list(self._blocks.values()):
            self.forget(block)
        return idle
