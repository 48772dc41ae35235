"""From a file's weights to stored weights: which type each gets under a quantization, a tensor at a time.

``int4`` reuses the file's own 4-bit blocks exactly (up to bf16 scales), because rounding a second time costs most of
the quality; the head and the embeddings are never int4.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trimtab.engine.embedded.gguf_blocks import Blocks4
from trimtab.engine.embedded.weights import WeightSource
from trimtab.errors import ModelFileError
from trimtab.kernels.packing import (
    INT4_GROUP,
    INT4_ROWS,
    DenseWeight,
    Int8Weight,
    Weight,
    pack_int4,
    pack_int8,
    round_to_int4,
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
    quants, scales, minima = zip(*(_int4_parts(source, name) for name in names), strict=True)
    num_rows = sum(part.shape[0] for part in quants)
    if num_rows % INT4_ROWS:
        raise ModelFileError(f"{', '.join(names)}: {num_rows} rows; int4 needs a multiple of {INT4_ROWS}")
    return pack_int4(torch.cat(quants), torch.cat(scales), torch.cat(minima))


def table(source: WeightSource, name: str, quantization: str) -> Weight:
    """The embedding table or the head: int8 where the projections are int4."""
    return _dense_or_int8(source.dense(name), "int8" if quantization == "int4" else quantization)


def _dense_or_int8(values: torch.Tensor, quantization: str) -> DenseWeight | Int8Weight:
    if quantization == "int8":
        return pack_int8(values)
    return DenseWeight(values.to(compute_dtype(quantization)).contiguous())


def _int4_parts(source: WeightSource, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """One weight's quants, scales and minima: the file's own where it has them."""
    blocks = source.blocks(name)
    if isinstance(blocks, Blocks4):
        quants, scales, minima = (torch.from_numpy(p.copy()) for p in (blocks.quants, blocks.scales, blocks.minima))
        return quants, scales, minima
    values = source.dense(name)
    if values.shape[1] % INT4_GROUP:
        raise ModelFileError(f"{name} has {values.shape[1]} columns; int4 needs a multiple of {INT4_GROUP}")
    return round_to_int4(values)
