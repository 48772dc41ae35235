"""GGUF's tensor types to floats, and its quantized blocks taken apart. NumPy; a tensor at a time.

Block layouts: ggml's ggml-common.h (block_q4_0, block_q4_1, block_q8_0).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trimtab.engine.embedded.gguf_file import TensorType

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Blocks4:
    """A 4-bit tensor as stored: ``value = quant * scale + minimum`` in groups of 32 along the rows."""

    quants: Bytes  # [rows, columns], each 0 to 15
    scales: Floats  # [rows, columns / 32]
    minima: Floats  # [rows, columns / 32]

    def dequantize(self) -> Floats:
        groups = self.quants.reshape(*self.scales.shape, 32).astype(np.float32)
        return (groups * self.scales[..., None] + self.minima[..., None]).reshape(self.quants.shape)


@dataclass(frozen=True, slots=True)
class Blocks8:
    """An 8-bit tensor as stored: ``value * scale`` in groups of 32 along the rows."""

    values: npt.NDArray[np.int8]  # [rows, columns]
    scales: Floats  # [rows, columns / 32]

    def dequantize(self) -> Floats:
        groups = self.values.reshape(*self.scales.shape, 32).astype(np.float32)
        return (groups * self.scales[..., None]).reshape(self.values.shape)


def split_8bit(data: Bytes, shape: tuple[int, ...]) -> Blocks8:
    """Q8_0 bytes as values and scales."""
    blocks = data.reshape(-1, shape[-1] // 32, 34)
    scales = blocks[..., :2].copy().view(np.float16)[..., 0].astype(np.float32)
    return Blocks8(blocks[..., 2:].view(np.int8).reshape(-1, shape[-1]), scales)


def split_4bit(data: Bytes, shape: tuple[int, ...], kind: TensorType) -> Blocks4:
    """Q4_0 or Q4_1 bytes as quants, scales and minima."""
    columns = shape[-1]
    header = 2 if kind is TensorType.Q4_0 else 4
    blocks = data.reshape(-1, columns // 32, header + 16)
    scales = blocks[..., :2].copy().view(np.float16)[..., 0].astype(np.float32)
    nibbles = blocks[..., header:]
    quants = np.concatenate((nibbles & 15, nibbles >> 4), axis=-1).reshape(-1, columns)
    minima = -8 * scales
    if kind is TensorType.Q4_1:
        minima = blocks[..., 2:4].copy().view(np.float16)[..., 0].astype(np.float32)
    return Blocks4(quants, scales, minima)


def dequantize(data: Bytes, shape: tuple[int, ...], kind: TensorType) -> Floats:
    """A tensor's bytes as float32 of ``shape``."""
    match kind:
        case TensorType.F32:
            flat = data.view(np.float32).copy()
        case TensorType.F16:
            flat = data.view(np.float16).astype(np.float32)
        case TensorType.BF16:
            flat = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        case TensorType.Q8_0:
            flat = split_8bit(data, shape).dequantize()
        case TensorType.Q4_0 | TensorType.Q4_1:
            flat = split_4bit(data, shape, kind).dequantize()
    return flat.reshape(shape)
