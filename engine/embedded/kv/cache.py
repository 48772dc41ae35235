"""The KV cache of one engine: its books and its memory, made together from the knobs. The core owns it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from trimtab.engine.contract import Configuration
from trimtab.engine.embedded.config import ModelConfig
from trimtab.engine.embedded.kv.allocator import BlockAllocator
from trimtab.engine.embedded.kv.layout import KVLayout
from trimtab.engine.embedded.kv.pages import Pages
from trimtab.engine.embedded.kv.pool import KVPool
from trimtab.engine.embedded.kv.storage import KVStorage
from trimtab.errors import KnobError


@dataclass(frozen=True, slots=True)
class KVCache:
    """``blocks`` decides and ``pool`` carries out."""

    blocks: BlockAllocator
    pool: KVPool

    @property
    def used_bytes(self) -> int:
        """What running sequences and cached prefixes take of the pool."""
        return self.blocks.num_used_units * self.pool.layout.page_bytes // self.blocks.units_per_page

    @classmethod
    def allocate(
        cls, model: ModelConfig, dtype: torch.dtype, configuration: Configuration, swap_file: Path | None = None
    ) -> KVCache:
        """Reserves the pool and the swap space, in ``swap_file`` when there is one, else in memory.

        Raises:
            KnobError: ``kv_cache_bytes`` would not hold one page.
            OSError: ``swap_file`` exists, or cannot be made.
        """
        block_size = int(configuration["block_size"])
        layout = KVLayout.of(model, block_size, dtype, str(configuration["kv_cache_dtype"]))
        num_pages = int(configuration["kv_cache_bytes"]) // layout.page_bytes
        if num_pages < 1:
            found = configuration["kv_cache_bytes"]
            raise KnobError(f"kv_cache_bytes: {found} is less than a page ({layout.page_bytes})")
        num_swap_pages = int(configuration["kv_swap_bytes"]) // layout.page_bytes
        swap = KVStorage.lazy(layout, num_swap_pages, swap_file) if num_swap_pages else None
        blocks = BlockAllocator(
            Pages(num_pages, layout.blocks_per_page),
            block_size,
            layout.write_type,
            Pages(num_swap_pages, layout.blocks_per_page) if num_swap_pages else None,
        )
        return cls(blocks, KVPool(layout, KVStorage.touched(layout, num_pages), swap))
