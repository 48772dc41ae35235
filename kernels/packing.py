"""How weights are stored for multiplication: one type a storage, built once at load.

``engine.embedded.quantization`` builds these; ``kernels.ops.linear`` multiplies with them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

INT4_GROUP = 32  # weights that share a scale and a minimum, as in GGUF's Q4 blocks
INT4_ROWS = 16  # torch's int4 product takes multiples of this many output rows


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """``[out_features, in_features]`` in fp32 or bf16."""

    values: Tensor


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """Symmetric int8 with one scale an output channel: ``weight[n, k] = values[n, k] * scales[n]``."""

    values: Tensor  # [out_features, in_features] int8
    scales: Tensor  # [out_features] bf16


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """Asymmetric int4 in groups of 32 inputs: ``weight = nibble * scale + minimum``.

    ``packed`` is what torch's int4 product reads, ``nibbles`` (two a byte, the low one first) what larger batches
    unpack: at 64 tokens unpacking once and multiplying in bf16 is faster than the int4 product (1.4 against 0.9 ms
    at 1536 x 576, one Zen 4 core, November 2026).
    """

    packed: Tensor
    scales_and_zeros: Tensor  # [in_features / 32, out_features, 2] bf16; zero = minimum + 8 * scale
    nibbles: Tensor  # [out_features, in_features / 2] uint8


Weight = DenseWeight | Int8Weight | Int4Weight


def pack_int8(weight: Tensor) -> Int8Weight:
    """Rounds ``[out_features, in_features]`` floats to int8 with a scale an output channel."""
    scales = (weight.abs().amax(dim=1) / 127).clamp(min=1e-12).to(torch.bfloat16)
    # Rounded against the scale as it is stored, so that its own rounding costs nothing.
    values = (weight / scales.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
    return Int8Weight(values, scales)


def pack_int4(quants: Tensor, scales: Tensor, minima: Tensor) -> Int4Weight:
    """Packs nibbles with their scales and minima.

    torch interleaves 64 output rows at a time, so weights that are multiplied as one are stacked before they are
    packed: packed parts must not be joined.

    Args:
        quants: ``[out_features, in_features]`` uint8, each 0 to 15.
        scales: ``[out_features, in_features / 32]`` float.
        minima: The same shape; what nibble 0 stands for.
    """
    zeros = minima + 8 * scales
    scales_and_zeros = torch.stack((scales.T, zeros.T), dim=-1).to(torch.bfloat16).contiguous()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(quants.to(torch.int32), 1)
    nibbles = (quants[:, 0::2] | (quants[:, 1::2] << 4)).to(torch.uint8).contiguous()
    return Int4Weight(packed, scales_and_zeros, nibbles)


def quantize_int4(weight: Tensor) -> Int4Weight:
    """Rounds ``[out_features, in_features]`` floats to int4 between each group's minimum and maximum."""
    return pack_int4(*round_to_int4(weight))


def round_to_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The quants, scales and minima of ``quantize_int4``, as ``pack_int4`` takes them."""
    groups = weight.reshape(weight.shape[0], -1, INT4_GROUP)
    minima, maxima = groups.amin(dim=-1), groups.amax(dim=-1)
    scales = ((maxima - minima) / 15).clamp(min=1e-12)
    quants = ((groups - minima[..., None]) / scales[..., None]).round().clamp(0, 15).to(torch.uint8)
    return quants.reshape(weight.shape), scales, minima


def unpack(weight: Int8Weight | Int4Weight, dtype: torch.dtype) -> Tensor:
    """The weight as ``[out_features, in_features]`` in ``dtype``."""
    if isinstance(weight, Int8Weight):
        return weight.values.to(dtype) * weight.scales.to(dtype)[:, None]
    num_rows, half = weight.nibbles.shape
    values = torch.empty(num_rows, half, 2, dtype=dtype)
    values[..., 0], values[..., 1] = weight.nibbles & 15, weight.nibbles >> 4
    scales, zeros = weight.scales_and_zeros.to(dtype).unbind(-1)
    groups = values.view(num_rows, -1, INT4_GROUP).sub_(8)
    return groups.mul_(scales.T[..., None]).add_(zeros.T[..., None]).view(num_rows, -1)


def rows(weight: Weight, indices: Tensor) -> Tensor:
    """Some output rows of ``weight`` (an embedding look-up), in its compute type."""
    if isinstance(weight, DenseWeight):
        return weight.values[indices]
    if isinstance(weight, Int8Weight):
        return weight.values[indices].to(torch.bfloat16) * weight.scales[indices][:, None]
    raise TypeError("embeddings are never int4: look-ups and the head need int8 or better")
