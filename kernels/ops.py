"""The operations that the engine's model is made of, dispatched to what is fastest: today PyTorch's CPU operations.

Faster kernels enter behind these functions; ``kernels.reference`` says what each must compute.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from trimtab.kernels.packing import DenseWeight, Int8Weight, Weight, unpack

# From this many rows on, unpacking the weights once and multiplying in ``batch_dtype`` beats torch's own products,
# which work row by row. One core each, 2026, at 3072 x 576: Zen 4 (bf16 instructions) is equal at 16 rows for int8,
# near 64 for int4; a Xeon with AVX-512 VNNI only at 128 and 256 (8.2 to 10.0 ms, 16.4 to 16.0 ms).
UNPACK_INT8_FROM_ROWS = {torch.bfloat16: 20, torch.float32: 128}
UNPACK_INT4_FROM_ROWS = {torch.bfloat16: 64, torch.float32: 256}
# From this many rows on, a CPU without bf16 instructions multiplies faster after converting bf16 weights to fp32
# (3072 x 576: 3.4 against 5.0 ms at 32 rows, 5.7 against 15 ms at 128; the same Xeon).
WIDEN_FROM_ROWS = 24
# Weights are converted this many values at a time, so that a vocabulary's head is multiplied from the CPU's cache
# (49152 x 576, 32 rows: 103 ms converted whole, 44 in tiles, 76 in bf16; the same Xeon).
WIDEN_TILE_VALUES = 1 << 20


@functools.cache
def batch_dtype() -> torch.dtype:
    """In what many rows are multiplied fastest: bf16 where the CPU has instructions for it, else fp32."""
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32


def linear(x: Tensor, weight: Weight) -> Tensor:
    """``x @ weight.T``: ``[num_tokens, in_features]`` to ``[num_tokens, out_features]`` in ``x``'s type."""
    num_rows, dtype = x.shape[0], batch_dtype()
    if isinstance(weight, DenseWeight):
        return _widened(x, weight.values) if num_rows >= WIDEN_FROM_ROWS else F.linear(x, weight.values)
    bounds = UNPACK_INT8_FROM_ROWS if isinstance(weight, Int8Weight) else UNPACK_INT4_FROM_ROWS
    if num_rows >= bounds[dtype]:
        return _widened(x, unpack(weight, dtype))
    if isinstance(weight, Int8Weight):
        return torch._weight_int8pack_mm(x, weight.values, weight.scales)
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight.packed, 32, weight.scales_and_zeros)  # type: ignore[no-any-return]


def _widened(x: Tensor, values: Tensor) -> Tensor:
    """The product in the wider of ``batch_dtype`` and ``x``'s own type."""
    dtype = torch.promote_types(batch_dtype(), x.dtype)
    wide = x.to(dtype)
    if values.dtype is dtype:
        return F.linear(wide, values).to(x.dtype)
    out = x.new_empty((x.shape[0], values.shape[0]))
    tile_rows = max(1, WIDEN_TILE_VALUES // x.shape[1])
    for start in range(0, values.shape[0], tile_rows):
        out[:, start : start + tile_rows] = F.linear(wide, values[start : start + tile_rows].to(dtype))
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of ``[num_tokens, hidden]``, the mean in float32, the result in ``x``'s type."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[num_tokens, 2 * intermediate]``, the gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotary_table(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[num_tokens, 1, head_dim / 2]`` float32 of one step's positions."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    angles = positions.float()[:, None] * (theta**-exponents)[None, :]
    return angles.cos()[:, None, :], angles.sin()[:, None, :]


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of ``[num_tokens, num_heads, head_dim]`` on pairs (i, i + head_dim/2), in ``x``'s type."""
    cos, sin = table
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
