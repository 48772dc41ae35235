"""Weights as the native products read them: panels of 16 output rows over all columns.

The layouts are those of ``src/weights.h``. Rows and columns are padded with weights that are zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor

PANEL_ROWS = 16
GROUP = 32  # columns that share a scale
_COLUMNS = 64  # columns are padded to a multiple of this: a pair of groups
_STEP = 4  # columns of a row that lie beside each other


class Format(IntEnum):
    """As numbered in ``src/products.h``."""

    INT4 = 0
    INT8 = 1
    BF16 = 2


@dataclass(frozen=True, slots=True)
class Panels:
    """One weight. ``bytes`` is contiguous ``[num_panels, ...]`` uint8; ``columns`` and rows are padded."""

    format: Format
    bytes: Tensor
    columns: int

    @property
    def num_panels(self) -> int:
        return self.bytes.shape[0]

    def interleaved(self, other: Panels) -> Panels:
        """Two panels of this weight, two of the other, and so on: the order that gate and up are stored in."""
        parts = [part.bytes.view(self.num_panels // 2, 2, -1) for part in (self, other)]
        return Panels(self.format, torch.stack(parts, dim=1).flatten(0, 2), self.columns)


def pack_int4(quants: Tensor, scales: Tensor, minima: Tensor, row_multiple: int = PANEL_ROWS) -> Panels:
    """``weight = quant * scale + minimum`` in groups of 32 columns.

    Args:
        quants: ``[rows, columns]`` uint8, each 0 to 15.
        scales: ``[rows, columns / 32]``; stored as fp16.
        minima: The same shape.
        row_multiple: Rows are padded to a multiple of this.
    """
    steps = _steps(_padded(quants, row_multiple, _COLUMNS))
    nibbles = steps[:, :, 0::2] | (steps[:, :, 1::2] << 4)
    parts = [_bytes(_by_group(_padded(x, row_multiple, _COLUMNS // GROUP))) for x in (scales, minima)]
    return Panels(Format.INT4, torch.cat((nibbles.flatten(2), *parts), dim=-1), GROUP * steps.shape[1])


def pack_int8(values: Tensor, scales: Tensor, row_multiple: int = PANEL_ROWS) -> Panels:
    """``weight = value * scale`` in groups of 32 columns.

    Args:
        values: ``[rows, columns]`` int8.
        scales: ``[rows, columns / 32]``; stored as fp16.
        row_multiple: Rows are padded to a multiple of this.
    """
    steps = _steps(_padded(values, row_multiple, _COLUMNS))
    stored = _bytes(_by_group(_padded(scales, row_multiple, _COLUMNS // GROUP)))
    pairs = [x.reshape(x.shape[0], x.shape[1] // 2, -1) for x in (steps.view(torch.uint8), stored)]
    return Panels(Format.INT8, torch.cat(pairs, dim=-1), GROUP * steps.shape[1])


def pack_bf16(weight: Tensor, row_multiple: int = PANEL_ROWS) -> Panels:
    """``[rows, columns]`` rounded to bf16."""
    padded = _padded(weight.to(torch.bfloat16), row_multiple, _COLUMNS)
    pairs = padded.view(-1, PANEL_ROWS, padded.shape[1] // 2, 2).transpose(1, 2)
    return Panels(Format.BF16, pairs.contiguous().view(torch.uint8).flatten(1), padded.shape[1])


def round_to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric rounding of ``[rows, columns]`` floats in groups of 32: the values and scales of ``pack_int8``."""
    padded = F.pad(weight, (0, -weight.shape[1] % GROUP))
    groups = padded.view(padded.shape[0], -1, GROUP)
    # Rounded against the scale as it is stored, so that its own rounding costs nothing.
    scales = (groups.abs().amax(dim=-1) / 127).to(torch.float16).float()
    values = (groups / scales.clamp(min=1e-12)[..., None]).round().clamp(-127, 127).to(torch.int8)
    return values.flatten(1)[:, : weight.shape[1]], scales


def _padded(x: Tensor, row_multiple: int, column_multiple: int) -> Tensor:
    return F.pad(x, (0, -x.shape[1] % column_multiple, 0, -x.shape[0] % row_multiple))


def _steps(x: Tensor) -> Tensor:
    """``[rows, columns]`` bytes as ``[panels, groups, 8, 16 * 4]``: four columns of 16 rows beside each other."""
    split = x.view(-1, PANEL_ROWS, x.shape[1] // GROUP, GROUP // _STEP, _STEP)
    return split.permute(0, 2, 3, 1, 4).contiguous().flatten(3)


def _by_group(x: Tensor) -> Tensor:
    """``[rows, groups]`` as ``[panels, groups, 16]``."""
    return x.view(-1, PANEL_ROWS, x.shape[1]).transpose(1, 2)


def _bytes(x: Tensor) -> Tensor:
    return x.to(torch.float16).contiguous().view(torch.uint8)
