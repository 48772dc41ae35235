"""How one KV pool's bytes are divided: what a page holds, and what it takes. Data only.

The core makes it from the knobs; the pool lays its memory out by it, the allocator counts by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from trimtab.engine.embedded.config import ModelConfig
from trimtab.kernels.kv_cache import KVType

SCALE_BYTES = {KVType.FULL: 0, KVType.INT8: 2, KVType.INT4: 4}  # a head and token; fp16


@dataclass(frozen=True, slots=True)
class KVLayout:
    """A page holds one block of ``write_type``, or ``blocks_per_page`` blocks of a type to compress to."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype  # the model's own
    write_type: KVType  # how new tokens are stored
    blocks_per_page: Mapping[KVType, int]

    @classmethod
    def of(cls, config: ModelConfig, block_size: int, dtype: torch.dtype, kv_cache_dtype: str) -> KVLayout:
        """``kv_cache_dtype`` is the knob: ``auto``, ``int8`` or ``int4``."""
        write_type = {"auto": KVType.FULL, "int8": KVType.INT8, "int4": KVType.INT4}[kv_cache_dtype]
        per_page = {write_type: 1}
        if write_type is KVType.FULL:
            per_page[KVType.INT8] = dtype.itemsize
        return cls(config.num_layers, config.num_kv_heads, config.head_dim, block_size, dtype, write_type, per_page)

    @property
    def page_value_bytes(self) -> int:
        """Bytes of a page's keys and values over all layers."""
        value_bits = {KVType.FULL: 8 * self.dtype.itemsize, KVType.INT8: 8, KVType.INT4: 4}[self.write_type]
        return self._num_tokens_and_heads * self.head_dim * value_bits // 8

    @property
    def page_scale_bytes(self) -> int:
        """Bytes of the scales that a page may need at most."""
        return self._num_tokens_and_heads * max(n * SCALE_BYTES[t] for t, n in self.blocks_per_page.items())

    @property
    def page_bytes(self) -> int:
        return self.page_value_bytes + self.page_scale_bytes

    @property
    def _num_tokens_and_heads(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.block_size
