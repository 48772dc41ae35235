"""Keys and values as the cache's blocks store them."""

from __future__ import annotations

import pytest
import torch

from trimtab.kernels.kv_cache import KVType, TypedBlocks, dequantize, quantize, read_rows, write_tokens

STEPS = {KVType.INT8: 2 * 127, KVType.INT4: 15}


@pytest.mark.parametrize("kv_type", [KVType.INT8, KVType.INT4])
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 300.0])
def test_a_compressed_value_is_within_half_a_step_of_its_head_and_token(kv_type: KVType, magnitude: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 3, 64) * magnitude * torch.rand(50, 3, 1)
    back = dequantize(*quantize(x, kv_type), torch.float32)
    largest = x.abs().amax(-1, keepdim=True)
    span = 2 * largest if kv_type is KVType.INT8 else x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)
    step = span / STEPS[kv_type]
    # The fp16 scale is off by 2^-11 of itself, or by half of fp16's smallest number, at each of up to 127 steps; so
    # is INT4's minimum.
    scale_error = 127 * (2**-11 * step).clamp(min=2**-25) + (2**-11 * largest).clamp(min=2**-25)
    bound = step / 2 + scale_error
    assert ((back - x).abs() <= bound).all()


@pytest.mark.parametrize("kv_type", [KVType.INT8, KVType.INT4])
def test_zeros_and_constants_survive(kv_type: KVType) -> None:
    for constant in (0.0, 2.5, -1.0):
        x = torch.full((4, 16), constant)
        back = dequantize(*quantize(x, kv_type), torch.float32)
        assert (back - x).abs().max() <= 2**-7 * max(abs(constant), 1e-6)
        assert back.isfinite().all()


@pytest.mark.parametrize("kv_type", list(KVType))
def test_tokens_are_read_where_they_were_written_and_nowhere_else(kv_type: KVType) -> None:
    torch.manual_seed(0)
    values, scales = quantize(torch.zeros(5, 2, 4, 8), kv_type)
    blocks = TypedBlocks(values.clone(), None if scales is None else scales.clone())
    new = torch.randn(3, 2, 8)
    slots = torch.tensor([17, 2, 8])  # block 4 place 1, block 0 place 2, block 2 place 0
    write_tokens(blocks, kv_type, new, slots)
    expected = dequantize(*quantize(torch.zeros(5, 2, 4, 8), kv_type), torch.float32)
    stored = dequantize(*quantize(new, kv_type), torch.float32)
    for token, slot in enumerate(slots.tolist()):
        expected[slot // 4, :, slot % 4] = stored[token]
    rows = torch.tensor([9, 0, 4, 5, 1])  # block * num_kv_heads + head
    assert torch.equal(read_rows(blocks, rows, torch.float32), expected.flatten(0, 1)[rows])
