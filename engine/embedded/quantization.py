"""From a file's weights to stored weights: which type each gets under a quantization, a tensor at a time.

``int4`` reuses the file's own 4-bit blocks exactly (up to bf16 scales), because rounding a second time costs most of
the quality; the head and the embeddings are never int4.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trimtab.engine.embedded.weights import WeightSource
from trimtab.errors import ModelFileError
from trimtab.kernels.packing import (
    INT4_GROUP,
    DenseWeight,
    Int4Weight,
    Int8Weight,
    Weight,
    pack_int4,
    pack_int8,
    quantize_int4,
)

QUANTIZATIONS = ("fp32", "bf16", "int8", "int4")


def compute_dtype(quantization: str) -> torch.dtype:
    """What activations and the KV cache are in."""
    if quantization not in QUANTIZATIONS:
        raise ModelFileError(f"quantization {quantization!r}; accepted: {', '.join(QUANTIZATIONS)}")
    return torch.float32 if quantization == "fp32" else torch.bfloat16


def projection(source: WeightSource, names: Sequence[str], quantization: str) -> Weight:
    """One product's weight: the named weights stacked along their output rows."""
    if quantization != "int4":
        return _dense_or_int8(torch.cat([source.dense(n) for n in names]), quantization)
    return _stack([_int4(source, name) for name in names])


def table(source: WeightSource, name: str, quantization: str) -> Weight:
    """The embedding table or the head: int8 where the projections are int4."""
    return _dense_or_int8(source.dense(name), "int8" if quantization == "int4" else quantization)


def _dense_or_int8(values: torch.Tensor, quantization: str) -> DenseWeight | Int8Weight:
    if quantization == "int8":
        return pack_int8(values)
    return DenseWeight(values.to(compute_dtype(quantization)).contiguous())


def _int4(source: WeightSource, name: str) -> Int4Weight:
    blocks = source.blocks(name)
    if blocks is not None:
        parts = (torch.from_numpy(p.copy()) for p in (blocks.quants, blocks.scales, blocks.minima))
        return pack_int4(*parts)
    values = source.dense(name)
    if values.shape[1] % INT4_GROUP or values.shape[0] % 16:
        raise ModelFileError(f"{name} has shape {tuple(values.shape)}: int4 needs multiples of 16 by {INT4_GROUP}")
    return quantize_int4(values)


def _stack(parts: Sequence[Int4Weight]) -> Int4Weight:
    """One int4 weight from several with the same inputs; torch's packing is per 16 or more output rows."""
    return Int4Weight(
        torch.cat([p.packed for p in parts]),
        torch.cat([p.scales_and_zeros for p in parts], dim=1).contiguous(),
        torch.cat([p.nibbles for p in parts]),
    )
