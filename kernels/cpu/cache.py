"""A whole paged cache as the native code sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trimtab.kernels.attention import Span
from trimtab.kernels.cpu.library import CacheStruct
from trimtab.kernels.kv_cache import BlockSlot, KVType

Ints = npt.NDArray[np.int32]

_DTYPES = {KVType.FULL: torch.bfloat16, KVType.INT8: torch.int8, KVType.INT4: torch.uint8}
_NUM_SCALES = {KVType.INT8: 1, KVType.INT4: 2}  # a head and token


@dataclass(frozen=True, slots=True)
class CacheViews:
    """``blocks`` has for each type that the pool can hold its values and scales (``None`` for ``FULL``).

    Values are ``[num_layers, 2, num_blocks, num_kv_heads, block_size, ...]``, keys first, as in ``kernels.kv_cache``;
    ``FULL`` is bf16.
    """

    blocks: Mapping[KVType, tuple[Tensor, Tensor | None]]
    block_size: int
    write_type: KVType

    def struct(self, num_layers: int, num_kv_heads: int, head_dim: int) -> CacheStruct:
        """Pointers to all of it. Raises ``ValueError`` where a shape, type or stride is another."""
        if self.write_type not in self.blocks:
            raise ValueError(f"the cache has no {self.write_type.name} blocks to write")
        struct = CacheStruct(block_size=self.block_size, write_type=self.write_type)
        for kv_type, (values, scales) in self.blocks.items():
            width = head_dim // 2 if kv_type is KVType.INT4 else head_dim
            rows = (num_layers, 2, values.shape[2], num_kv_heads, self.block_size)
            _check(f"{kv_type.name} values", values, (*rows, width), _DTYPES[kv_type])
            name = kv_type.name.lower()
            setattr(struct, name, values.data_ptr())
            struct.num_blocks[kv_type] = values.shape[2]
            if kv_type in _NUM_SCALES:
                if scales is None:
                    raise ValueError(f"{kv_type.name} blocks need scales")
                wanted = rows if kv_type is KVType.INT8 else (*rows, 2)
                _check(f"{kv_type.name} scales", scales, wanted, torch.float16)
                setattr(struct, f"{name}_scales", scales.data_ptr())
        return struct


def flatten_spans(spans: Sequence[Span]) -> tuple[Ints, Ints]:
    """The spans as ``[num_spans, 4]`` and all their blocks as ``[num_blocks, 2]``: type and number."""
    rows: list[tuple[int, int, int, int]] = []
    blocks: list[BlockSlot] = []
    for span in spans:
        rows.append((span.query_start, span.query_len, span.context_len, len(blocks)))
        blocks += span.table
    return np.array(rows, np.int32).reshape(-1, 4), np.array(blocks, np.int32).reshape(-1, 2)


def check_spans(spans: Ints, tables: Ints, num_tokens: int, cache: CacheStruct) -> None:
    """Raises ``ValueError`` unless the spans cover the batch, and their tables name blocks of the cache."""
    starts, lengths, contexts, table_starts = spans.T
    if (starts != np.cumsum(lengths) - lengths).any() or lengths.sum() != num_tokens or (lengths < 1).any():
        raise ValueError(f"spans must cover the batch's {num_tokens} tokens one after the other")
    num_blocks = np.diff(table_starts, append=len(tables))
    if (contexts < lengths).any() or (contexts > num_blocks * cache.block_size).any():
        raise ValueError("a context is shorter than its queries or longer than its block table")
    types, numbers = tables.T
    if (types < 0).any() or (types >= len(KVType)).any():
        raise ValueError(f"a block's type must be 0 to {len(KVType) - 1}")
    if (numbers < 0).any() or (numbers >= np.array(cache.num_blocks)[types]).any():
        raise ValueError("a block table names a block that the cache does not have")


def check_within(name: str, values: Ints, limit: int) -> None:
    """Raises ``ValueError`` unless ``values`` is a contiguous int32 vector of numbers from 0 to ``limit - 1``."""
    if values.dtype != np.int32 or values.ndim != 1 or not values.flags.c_contiguous:
        raise ValueError(f"{name} must be a contiguous int32 vector")
    if len(values) and not (values.min() >= 0 and values.max() < limit):
        raise ValueError(f"{name} must lie within 0 to {limit - 1}")


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype is not dtype or not tensor.is_contiguous():
        raise ValueError(f"{name} are {tuple(tensor.shape)} {tensor.dtype}; expected {shape} {dtype}, contiguous")
