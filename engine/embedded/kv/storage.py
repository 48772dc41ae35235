"""Memory for KV pages: one buffer, allocated once, accounted to the byte, seen as each type of block.

The pool has one for the blocks that attention reads, and one to swap into. Which block belongs to whom is the block
allocator's matter.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from trimtab.engine.embedded.kv.layout import KVLayout
from trimtab.kernels.kv_cache import KVType, PagedTensor, TypedBlocks


class KVStorage:
    """``num_pages`` pages.

    Within a block each head's tokens are contiguous, so attention gathers one run of ``block_size * head_dim`` values
    for each block and head.
    """

    def __init__(self, layout: KVLayout, num_pages: int, buffer: Tensor) -> None:
        """``buffer`` has ``num_pages * layout.page_bytes`` bytes, as uint8."""
        self.num_bytes = len(buffer)
        num_value_bytes = num_pages * layout.page_value_bytes
        # Values [num_layers, 2, num_blocks, num_kv_heads, block_size, ...] and scales, which FULL has not.
        self.blocks = {
            kv_type: _typed(kv_type, layout, num_pages, buffer[:num_value_bytes], buffer[num_value_bytes:])
            for kv_type in layout.blocks_per_page
        }
        self._layers = tuple(tuple(self._view(i, kind) for kind in (0, 1)) for i in range(layout.num_layers))

    @classmethod
    def touched(cls, layout: KVLayout, num_pages: int) -> KVStorage:
        """In memory that is there from the start: what is missing shows now, and padding never reads a NaN."""
        return cls(layout, num_pages, torch.zeros(num_pages * layout.page_bytes, dtype=torch.uint8))

    @classmethod
    def lazy(cls, layout: KVLayout, num_pages: int, file: Path | None) -> KVStorage:
        """In a new file, or in memory that is taken only as pages are written.

        The file's space is reserved at once, and its name is gone at once: it ends with the process.

        Raises:
            OSError: the file exists, or cannot be made as large as that.
        """
        num_bytes = num_pages * layout.page_bytes
        if file is None:
            return cls(layout, num_pages, torch.empty(num_bytes, dtype=torch.uint8))
        with file.open("xb") as opened:
            try:
                os.posix_fallocate(opened.fileno(), 0, num_bytes)
                buffer = torch.from_file(str(file), shared=True, size=num_bytes, dtype=torch.uint8)
            finally:
                file.unlink()
        return cls(layout, num_pages, buffer)

    def layer(self, index: int) -> tuple[PagedTensor, PagedTensor]:
        """Layer ``index``'s keys and values (views)."""
        keys, values = self._layers[index]
        return keys, values

    def read(self, kv_type: KVType, indices: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Copies of some blocks: values and scales ``[num_layers, 2, num_blocks, num_kv_heads, block_size, ...]``."""
        values, scales = self.blocks[kv_type]
        wanted = torch.tensor(indices)
        return values.index_select(2, wanted), None if scales is None else scales.index_select(2, wanted)

    def write(self, kv_type: KVType, indices: Sequence[int], content: tuple[Tensor, Tensor | None]) -> None:
        """Puts what ``read`` of the same type gave into other blocks."""
        values, scales = self.blocks[kv_type]
        wanted = torch.tensor(indices)
        values.index_copy_(2, wanted, content[0])
        if scales is not None and content[1] is not None:
            scales.index_copy_(2, wanted, content[1])

    def _view(self, layer: int, kind: int) -> PagedTensor:
        return {
            kv_type: TypedBlocks(values[layer, kind], None if scales is None else scales[layer, kind])
            for kv_type, (values, scales) in self.blocks.items()
        }


def _typed(
    kv_type: KVType, layout: KVLayout, num_pages: int, values: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The bytes as all layers' blocks of one type: ``[num_layers, 2, num_blocks, num_kv_heads, block_size, ...]``."""
    num_blocks = num_pages * layout.blocks_per_page[kv_type]
    blocks = (layout.num_layers, 2, num_blocks, layout.num_kv_heads, layout.block_size)
    match kv_type:
        case KVType.FULL:
            return values.view(layout.dtype).view(*blocks, layout.head_dim), None
        case KVType.INT8:
            return values.view(torch.int8).view(*blocks, layout.head_dim), scales.view(torch.float16).view(blocks)
        case KVType.INT4:
            return values.view(*blocks, layout.head_dim // 2), scales.view(torch.float16).view(*blocks, 2)
