"""How keys and values lie in the paged cache: the types of its blocks, reading and writing them.

A block is stored in the model's own type or compressed, and blocks of different types may follow each other in one
sequence. The engine's pool makes the views that these functions work on; which block belongs to whom is its matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor


class KVType(IntEnum):
    """How one block's keys and values are stored."""

    FULL = 0  # the model's own type
    INT8 = 1  # symmetric, a scale a head and token
    INT4 = 2  # a scale and a minimum a head and token, two values a byte


class BlockSlot(NamedTuple):
    """Where one block lies: its type, and its place among the blocks of that type."""

    kv_type: KVType
    number: int


@dataclass(frozen=True, slots=True)
class TypedBlocks:
    """All blocks of one type, of one layer's keys or values. Views of the pool."""

    values: Tensor  # [num_blocks, num_kv_heads, block_size, head_dim], for INT4 [..., head_dim / 2] uint8
    scales: Tensor | None  # INT8: [num_blocks, num_kv_heads, block_size] fp16; INT4: [..., 2] (scale, minimum)


PagedTensor = Mapping[KVType, TypedBlocks]  # one layer's keys or values, seen as each type that the pool can hold


def quantize(x: Tensor, kv_type: KVType) -> tuple[Tensor, Tensor | None]:
    """``[..., head_dim]`` floats as the values and scales that ``TypedBlocks`` of this type stores."""
    match kv_type:
        case KVType.FULL:
            return x, None
        case KVType.INT8:
            return _quantize_int8(x.float())
        case KVType.INT4:
            return _quantize_int4(x.float())


def dequantize(values: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The inverse of ``quantize``: ``[..., head_dim]`` in ``dtype``."""
    if scales is None:
        return values.to(dtype)
    if values.dtype is torch.int8:
        return values.to(dtype).mul_(scales.to(dtype)[..., None])
    unpacked = torch.stack((values & 15, values >> 4), dim=-1).flatten(-2).to(dtype)
    scale, minimum = scales.to(dtype).unbind(-1)
    return unpacked.mul_(scale[..., None]).add_(minimum[..., None])


def write_tokens(blocks: TypedBlocks, kv_type: KVType, new: Tensor, slots: Tensor) -> None:
    """Puts ``new`` ``[num_tokens, num_kv_heads, head_dim]`` at ``slots`` ``[num_tokens]``.

    A slot is the block's index times ``block_size`` plus the token's place in it.
    """
    block_size = blocks.values.shape[2]
    index, offset = slots // block_size, slots % block_size
    values, scales = quantize(new, kv_type)
    blocks.values[index, :, offset] = values
    if blocks.scales is not None and scales is not None:
        blocks.scales[index, :, offset] = scales


def read_rows(blocks: TypedBlocks, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """``[num_rows, block_size, head_dim]`` in ``dtype``; a row is block * num_kv_heads + head."""
    values = blocks.values
    picked = values.view(-1, values.shape[2] * values.shape[3]).index_select(0, rows)
    picked = picked.view(len(rows), values.shape[2], values.shape[3])
    if blocks.scales is None:
        return picked
    scales = blocks.scales.flatten(0, 1).index_select(0, rows)
    return dequantize(picked, scales, dtype)


def _quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    # Rounded against the scale as it is stored, so that the scale's own rounding costs nothing.
    scales = (x.abs().amax(dim=-1) / 127).clamp(min=1e-7).to(torch.float16)
    return (x / scales.float()[..., None]).round_().clamp_(-127, 127).to(torch.int8), scales


def _quantize_int4(x: Tensor) -> tuple[Tensor, Tensor]:
    minima, maxima = x.amin(dim=-1), x.amax(dim=-1)
    stored = torch.stack(((maxima - minima).clamp(min=1e-6) / 15, minima), dim=-1).to(torch.float16)
    scale, minimum = stored.float().unbind(-1)
    quants = ((x - minimum[..., None]) / scale[..., None]).round_().clamp_(0, 15).to(torch.uint8)
    return quants[..., 0::2] | (quants[..., 1::2] << 4), stored
