"""Quantized products: what the engine multiplies with is what was stored, whatever the shapes that are stacked."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from trimtab.engine.embedded.config import ModelConfig
from trimtab.engine.embedded.gguf_blocks import Blocks4
from trimtab.engine.embedded.quantization import projection
from trimtab.errors import ModelFileError
from trimtab.kernels import ops
from trimtab.kernels.packing import unpack


class Given:
    """A weight source over given matrices; some of them as 4-bit blocks."""

    def __init__(self, weights: Mapping[str, Tensor], blocks: Mapping[str, Blocks4] | None = None) -> None:
        self._weights = weights
        self._blocks = blocks or {}

    @property
    def config(self) -> ModelConfig:
        raise AssertionError("products need no configuration")

    def dense(self, name: str) -> Tensor:
        return self._weights[name]

    def blocks(self, name: str) -> Blocks4 | None:
        return self._blocks.get(name)


# torch interleaves 64 rows of int4 at a time: parts that end inside such a group are the hard ones.
@pytest.mark.parametrize("num_rows", [(64, 32, 32), (48, 48), (96, 96), (576, 192, 192), (8, 8)])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_stacked_product_is_that_of_its_parts(num_rows: tuple[int, ...], quantization: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {str(i): torch.randn(n, 64, generator=generator) for i, n in enumerate(num_rows)}
    stacked = projection(Given(weights), list(weights), quantization)
    x = torch.randn(3, 64, generator=generator).to(torch.bfloat16)
    expected = x.float() @ unpack(stacked, torch.float32).T
    # bf16 keeps 8 bits of each output, whose own size is near sqrt(64) = 8; 64 of them are summed in float32.
    torch.testing.assert_close(ops.linear(x, stacked).float(), expected, rtol=2**-6, atol=0.15)
    # Half a step of a 4-bit group that spans about 4.5 standard deviations, and bf16 scales.
    original = torch.cat(list(weights.values()))
    assert (unpack(stacked, torch.float32) - original).abs().max() < 0.3


def test_rows_that_torch_cannot_take_are_refused_by_name() -> None:
    with pytest.raises(ModelFileError, match="q: 40 rows; int4 needs a multiple of 16"):
        projection(Given({"q": torch.ones(40, 64)}), ["q"], "int4")
    with pytest.raises(ModelFileError, match="q has 48 columns; int4 needs a multiple of 32"):
        projection(Given({"q": torch.ones(64, 48)}), ["q"], "int4")
