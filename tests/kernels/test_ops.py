"""Every operation against its plain reference, at irregular shapes, with inputs left as they were.

Tolerances: float32 results differ by summation order only (1e-5 of the result's scale). bf16 keeps 8 bits of
mantissa, so one rounding is 2^-9 of a value; a product of K terms rounds inputs and output, for which 2^-6 of the
result's scale is generous and still ten times below a wrong index or scale.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trimtab.kernels import ops, reference
from trimtab.kernels.packing import DenseWeight, Weight, pack_int4, pack_int8, quantize_int4, rows, unpack

BF16, FP32 = torch.bfloat16, torch.float32
TOLERANCE = {FP32: 1e-5, BF16: 2**-6}


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    scale = expected.abs().max().item() or 1.0
    assert (found.float() - expected.float()).abs().max().item() <= TOLERANCE[dtype] * scale


def unchanged(call: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    before = [x.clone() for x in inputs]
    out = call(*inputs)
    for old, new in zip(before, inputs, strict=True):
        assert torch.equal(old, new)
    return out


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def weights(kind: str, out_features: int, in_features: int) -> Weight:
    dense = torch.randn(out_features, in_features)
    match kind:
        case "fp32":
            return DenseWeight(dense)
        case "bf16":
            return DenseWeight(dense.to(BF16))
        case "int8":
            return pack_int8(dense)
        case _:
            return quantize_int4(dense)


@pytest.mark.parametrize("batch_dtype", [FP32, BF16])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("num_tokens", [1, 3, 19, 20, 63, 64, 128, 256])
@pytest.mark.parametrize(("out_features", "in_features"), [(48, 96), (160, 32), (16, 544)])
def test_linear(
    kind: str,
    num_tokens: int,
    out_features: int,
    in_features: int,
    batch_dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ops, "batch_dtype", lambda: batch_dtype)  # as on a CPU with and without bf16 instructions
    monkeypatch.setattr(ops, "WIDEN_TILE_VALUES", 2000)  # several tiles, the last one short
    weight = weights(kind, out_features, in_features)
    dtype = FP32 if kind == "fp32" else BF16
    x = torch.randn(num_tokens, in_features).to(dtype)
    out = unchanged(lambda v: ops.linear(v, weight), x)
    assert out.dtype is dtype
    close(out, reference.linear(x, weight), dtype)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantized_weights_are_near_the_originals(kind: str) -> None:
    dense = torch.randn(64, 256)
    weight = pack_int8(dense) if kind == "int8" else quantize_int4(dense)
    step = (2 * dense.abs().max() / 254) if kind == "int8" else (dense.max() - dense.min()) / 15
    # Half a step of rounding, and the scale's own rounding to bf16 over the whole range.
    assert (reference.dequantize(weight) - dense).abs().max() <= step / 2 + 2**-8 * dense.abs().max() * 2
    for dtype in (BF16, FP32):
        close(unpack(weight, dtype), reference.dequantize(weight), dtype)


def test_int4_blocks_keep_their_values_exactly_where_scales_are_bf16() -> None:
    quants = torch.randint(0, 16, (32, 64), dtype=torch.uint8)
    scales = torch.full((32, 2), 0.25)
    minima = torch.full((32, 2), -1.5)
    weight = pack_int4(quants, scales, minima)
    assert torch.equal(reference.dequantize(weight), quants * 0.25 - 1.5)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
def test_embedding_rows(kind: str) -> None:
    weight = weights(kind, 48, 64)
    ids = torch.tensor([0, 47, 5, 5])
    close(rows(weight, ids), reference.dequantize(weight)[ids], FP32 if kind == "fp32" else BF16)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_norm_rotation_and_swiglu(dtype: torch.dtype) -> None:
    x, weight = (torch.randn(7, 96) * 3).to(dtype), torch.rand(96).to(dtype)
    close(unchanged(lambda a, b: ops.rms_norm(a, b, 1e-5), x, weight), reference.rms_norm(x, weight, 1e-5), dtype)
    close(unchanged(ops.swiglu, x), reference.swiglu(x), dtype)
    heads, positions = torch.randn(5, 3, 16).to(dtype), torch.tensor([0, 1, 7, 1000, 8191])
    table = ops.rotary_table(positions, 16, 10000.0)
    # float32 angles near 8191 radians carry an error of about 5e-4.
    found = unchanged(lambda v: ops.rotate(v, table), heads)
    assert (found.float() - reference.rotate(heads, positions, 10000.0)).abs().max() < (
        2e-3 if dtype is FP32 else 3e-2
    )
