"""One KV block and the moves of its content. Data only: the allocator decides, the pool carries out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from trimtab.kernels.kv_cache import BlockSlot


@dataclass(slots=True, eq=False)
class Block:
    """``block_size`` tokens' keys and values. Tables of several sequences may hold the same block.

    ``slot`` changes when the content moves (compression); all tables see it.
    """

    slot: BlockSlot
    number: int  # grows by one a block: the lowest among several was made first
    num_owners: int = 1  # tables that hold it
    key: bytes | None = None  # the prefix that it ends, while the prefix cache knows it


class MoveKind(Enum):
    """Between which memories a block's content moves."""

    COPY = "copy"  # within the pool, into another type where the slots' types differ
    SWAP_OUT = "swap_out"  # from the pool to the swap space, as it is
    SWAP_IN = "swap_in"  # back


@dataclass(frozen=True, slots=True)
class Move:
    """One block's content goes from ``source`` to ``target``."""

    kind: MoveKind
    source: BlockSlot
    target: BlockSlot
