"""The paged KV cache's memory: the pages that attention reads, and the swap space beside them.

The block allocator lists what must move; ``carry_out`` moves it. The core makes the pool, the runner uses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from trimtab.engine.embedded.kv.block import Move, MoveKind
from trimtab.engine.embedded.kv.layout import KVLayout
from trimtab.engine.embedded.kv.storage import KVStorage
from trimtab.kernels.kv_cache import BlockSlot, KVType, PagedTensor, dequantize, quantize

# Blocks that are moved by one operation, to bound its copies: a block of SmolLM2-135M is 360 KiB in bf16.
_MOVED_TOGETHER = 64


class KVPool:
    """``swap`` is ``None`` where nothing can be swapped out."""

    def __init__(self, layout: KVLayout, pages: KVStorage, swap: KVStorage | None = None) -> None:
        self.layout = layout
        self._pages = pages
        self._swap = swap

    @property
    def num_bytes(self) -> int:
        """What the pool and its swap space take."""
        return self._pages.num_bytes + (0 if self._swap is None else self._swap.num_bytes)

    @property
    def blocks(self) -> Mapping[KVType, tuple[Tensor, Tensor | None]]:
        """All layers' blocks of each type."""
        return self._pages.blocks

    def layer(self, index: int) -> tuple[PagedTensor, PagedTensor]:
        """Layer ``index``'s keys and values (views)."""
        return self._pages.layer(index)

    @torch.inference_mode()
    def carry_out(self, moves: Sequence[Move]) -> None:
        """Moves blocks, as if one after the other in the given order."""
        for batch in _moved_together(moves):
            kind, source_type, target_type = _sort(batch[0])
            source = self._swap if kind is MoveKind.SWAP_IN else self._pages
            target = self._swap if kind is MoveKind.SWAP_OUT else self._pages
            assert source is not None, "the allocator swaps only where there is a swap space"
            assert target is not None, "the allocator swaps only where there is a swap space"
            content = source.read(source_type, [m.source.number for m in batch])
            if source_type is not target_type:
                content = quantize(dequantize(*content, self.layout.dtype), target_type)
            target.write(target_type, [m.target.number for m in batch], content)


def _sort(move: Move) -> tuple[MoveKind, KVType, KVType]:
    return move.kind, move.source.kv_type, move.target.kv_type


def _moved_together(moves: Sequence[Move]) -> Iterator[list[Move]]:
    """Consecutive moves of one sort, none of which reads what another of them writes."""
    batch: list[Move] = []
    written: set[BlockSlot] = set()
    for move in moves:
        if batch and (_sort(move) != _sort(batch[0]) or move.source in written or len(batch) == _MOVED_TOGETHER):
            yield batch
            batch, written = [], set()
        batch.append(move)
        written.add(move.target)
    if batch:
        yield batch
