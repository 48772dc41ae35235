"""The paged KV cache's memory: one tensor, allocated once, accounted to the byte.

Which block belongs to whom is the block allocator's matter; here are only the bytes and their layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.engine.embedded.config import ModelConfig


class KVPool:
    """``num_blocks`` blocks of ``block_size`` tokens for every layer.

    The layout is ``[num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]``: within a block each head's
    tokens are contiguous, so attention gathers one run of ``block_size * head_dim`` values for each block and head.
    """

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        self.block_size = block_size
        shape = (config.num_layers, 2, num_blocks, config.num_kv_heads, block_size, config.head_dim)
        # Zeroed, so the pages are touched (and missing memory shows) at start, and padding never reads a NaN.
        self._storage = torch.zeros(shape, dtype=dtype)

    @staticmethod
    def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        """Bytes that one block takes over all layers, K and V."""
        return config.num_layers * 2 * config.kv_size * block_size * dtype.itemsize

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Layer ``index``'s keys and values, each ``[num_blocks, num_kv_heads, block_size, head_dim]`` (views)."""
        keys, values = self._storage[index].unbind(0)
        return keys, values
