"""Each native operation against its plain reference, at every level that this CPU runs, at irregular shapes.

Integer sums are exact, so against activations that the reference rounded alike only float32's summation order and one
unit of rounding in a scale are left: 1e-5 of the result's size, and 1e-4 where a value may round to its neighbour.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from trimtab.kernels import reference
from trimtab.kernels.attention import Span
from trimtab.kernels.cpu import operations
from trimtab.kernels.cpu.cache import CacheViews
from trimtab.kernels.cpu.library import Library
from trimtab.kernels.cpu.panels import Panels, pack_bf16, pack_int4, pack_int8, round_to_int8
from trimtab.kernels.kv_cache import BlockSlot, KVType, dequantize

NUM_TOKENS = [1, 2, 3, 7, 8, 9, 11, 12, 13, 17, 33, 100]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max().item() <= tolerance * (expected.abs().max().item() or 1.0)


def int4_weight(num_rows: int, columns: int) -> tuple[Panels, Tensor]:
    quants = torch.randint(0, 16, (num_rows, columns), dtype=torch.uint8)
    scales, minima = (
        torch.rand(num_rows, columns // 32).half().float(),
        torch.randn(num_rows, columns // 32).half().float(),
    )
    dense = quants.view(num_rows, -1, 32) * scales[..., None] + minima[..., None]
    return pack_int4(quants, scales, minima), dense.view(num_rows, columns)


def int8_weight(num_rows: int, columns: int) -> tuple[Panels, Tensor]:
    values = torch.randint(-128, 128, (num_rows, columns), dtype=torch.int8)
    scales = torch.rand(num_rows, columns // 32).half().float()
    dense = values.view(num_rows, -1, 32) * scales[..., None]
    return pack_int8(values, scales), dense.view(num_rows, columns)


def bf16_weight(num_rows: int, columns: int) -> tuple[Panels, Tensor]:
    dense = torch.randn(num_rows, columns).bfloat16()
    return pack_bf16(dense), dense.float()


WEIGHTS = {"int4": int4_weight, "int8": int8_weight, "bf16": bf16_weight}


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize(("num_rows", "columns"), [(16, 64), (48, 96), (5, 32), (80, 576)])
def test_linear(library: Library, kind: str, num_tokens: int, num_rows: int, columns: int) -> None:
    weight, dense = WEIGHTS[kind](num_rows, columns)
    x = torch.randn(num_tokens, columns) * torch.rand(num_tokens, 1) * 10
    before = x.clone()
    found = operations.linear(library, x, weight)
    seen = x if kind == "bf16" else reference.round_activations(x)
    close(found[:, :num_rows], (seen.double() @ dense.double().T).float())
    assert not found[:, num_rows:].any()
    assert torch.equal(x, before)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_extreme_values_do_not_overflow(library: Library, kind: str) -> None:
    columns, x = 64, torch.ones(3, 64)
    match kind:
        case "int4":
            weight = pack_int4(torch.full((16, 64), 15, dtype=torch.uint8), torch.ones(16, 2), torch.ones(16, 2))
            expected = 16.0 * columns
        case "int8":
            weight = pack_int8(torch.full((16, 64), -128, dtype=torch.int8), torch.ones(16, 2))
            expected = -128.0 * columns
        case _:
            weight, expected = pack_bf16(torch.full((16, 64), -3.0e38)), float(torch.tensor(-3.0e38).bfloat16())
            x = torch.zeros(3, 64)
            x[:, 5] = 1.0
    torch.testing.assert_close(
        operations.linear(library, x, weight), torch.full((3, 16), expected), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("kind", WEIGHTS)
def test_nothing_comes_of_activations_that_are_zero(library: Library, kind: str) -> None:
    weight, _ = WEIGHTS[kind](16, 64)
    assert not operations.linear(library, torch.zeros(5, 64), weight).any()


@pytest.mark.parametrize("kind", WEIGHTS)
def test_look_up(library: Library, kind: str) -> None:
    weight, dense = WEIGHTS[kind](37, 96)
    for row in (0, 15, 16, 36):
        assert torch.equal(operations.look_up(library, weight, row)[:96], dense[row])


def test_rounding_to_int8_keeps_what_int8_can_hold() -> None:
    values = torch.randint(-126, 127, (16, 64), dtype=torch.int8)
    values[:, ::32] = 127
    found, scales = round_to_int8(values.float() * 0.5)
    assert torch.equal(found, values)
    assert (scales == 0.5).all()


def new_cache(write_type: KVType, num_kv_heads: int, head_dim: int, block_size: int) -> CacheViews:
    """A cache whose blocks of all types lie apart, filled with what must not be read."""
    rows = (1, 2, 40, num_kv_heads, block_size)
    return CacheViews(
        {
            KVType.FULL: (torch.full((*rows, head_dim), 9e9).bfloat16(), None),
            KVType.INT8: (torch.full((*rows, head_dim), 99, dtype=torch.int8), torch.full(rows, 9e4).half()),
            KVType.INT4: (
                torch.full((*rows, head_dim // 2), 99, dtype=torch.uint8),
                torch.full((*rows, 2), 6e4).half(),
            ),
        },
        block_size,
        write_type,
    )


def slots_of(table: list[BlockSlot], positions: range, block_size: int) -> np.ndarray:
    return np.array([table[p // block_size].number * block_size + p % block_size for p in positions], np.int32)


def stored_rows(cache: CacheViews, table: list[BlockSlot], length: int) -> tuple[Tensor, Tensor]:
    """A sequence's keys and values [length, num_kv_heads, head_dim] as the cache means them."""
    kinds: list[Tensor] = []
    for kind in (0, 1):
        parts = []
        for slot in table:
            values, scales = cache.blocks[slot.kv_type]
            part = None if scales is None else scales[0, kind, slot.number]
            parts.append(dequantize(values[0, kind, slot.number], part, torch.float32))
        kinds.append(torch.cat(parts, dim=1)[:, :length].transpose(0, 1))
    return kinds[0], kinds[1]


@pytest.mark.parametrize("kv_type", KVType)
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 16), (3, 64), (2, 48)])
def test_written_tokens_are_stored_as_the_reference_stores_them(
    library: Library, kv_type: KVType, num_kv_heads: int, head_dim: int
) -> None:
    from trimtab.kernels.kv_cache import quantize

    cache = new_cache(kv_type, num_kv_heads, head_dim, 16)
    table = [BlockSlot(kv_type, n) for n in (7, 0, 39)]
    keys, values = torch.randn(2, 40, num_kv_heads, head_dim) * 3
    keys[3] = 0.0
    operations.write_tokens(library, cache, keys, values, slots_of(table, range(40), 16))
    found = stored_rows(cache, table, 40)
    for original, kept in zip((keys, values), found, strict=True):
        stored, scales = quantize(original, kv_type)
        expected = dequantize(stored.bfloat16() if scales is None else stored, scales, torch.float32)
        # A value that lies between two steps may go to either of them where divisions round differently.
        step = 0.0 if scales is None else float(expected.abs().max()) / (127 if kv_type is KVType.INT8 else 7)
        assert (kept - expected).abs().max() <= step * 1.01
        assert ((kept - expected).abs() > 1e-6).float().mean() < 0.01


# query_len, context_len of each sequence: alone, decode of ragged contexts, drafts, prefill chunks, all together.
BATCHES = [
    [(1, 1)],
    [(1, 17), (1, 1), (1, 500), (1, 33)],
    [(4, 40), (1, 64), (8, 8), (3, 300)],
    [(33, 33)],
    [(17, 50), (100, 100), (1, 77), (70, 333)],
]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (1, 1, 16), (10, 2, 48), (64, 1, 32)]
)
@pytest.mark.parametrize("block_size", [8, 16, 24])
def test_attention_over_blocks_of_all_types(
    library: Library,
    batch: list[tuple[int, int]],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
) -> None:
    cache = new_cache(KVType.FULL, num_kv_heads, head_dim, block_size)
    cache = CacheViews(
        {k: (_wider(v), s if s is None else _wider(s)) for k, (v, s) in cache.blocks.items()}, block_size, KVType.FULL
    )
    free = {t: iter(torch.randperm(cache.blocks[t][0].shape[2]).tolist()) for t in KVType}
    spans, expected, start = [], [], 0
    query = torch.randn(sum(q for q, _ in batch), num_heads, head_dim)
    for index, (query_len, context_len) in enumerate(batch):
        types = [KVType((index + i) % 3) for i in range(-(-context_len // block_size))]
        table = [BlockSlot(t, next(free[t])) for t in types]
        for kv_type in KVType:
            own = [p for p in range(context_len) if types[p // block_size] is kv_type]
            if own:
                typed = CacheViews(cache.blocks, block_size, kv_type)
                rows = torch.randn(2, len(own), num_kv_heads, head_dim)
                slots = np.concatenate([slots_of(table, range(p, p + 1), block_size) for p in own])
                operations.write_tokens(library, typed, rows[0], rows[1], slots)
        keys, values = stored_rows(cache, table, context_len)
        rows = query[start : start + query_len]
        expected.append(reference.attention(rows, keys, values, context_len - query_len))
        spans.append(Span(start, query_len, context_len, tuple(table)))
        start += query_len
    found = operations.attention(library, query, cache, spans)
    close(found, torch.cat(expected), 2e-5)


def _wider(blocks: Tensor) -> Tensor:
    return blocks.repeat(1, 1, 3, *[1] * (blocks.dim() - 3))


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([Span(0, 1, 17, (BlockSlot(KVType.FULL, 0),))], "longer than its block table"),
        ([Span(0, 1, 1, (BlockSlot(KVType.FULL, 40),))], "a block that the cache does not have"),
        ([Span(1, 1, 1, (BlockSlot(KVType.FULL, 0),))], "cover the batch"),
        ([Span(0, 2, 1, (BlockSlot(KVType.FULL, 0),))], "cover the batch"),
        ([], "cover the batch"),
    ],
)
def test_what_would_be_read_out_of_bounds_is_refused(library: Library, spans: list[Span], message: str) -> None:
    cache = new_cache(KVType.FULL, 1, 16, 16)
    with pytest.raises(ValueError, match=message):
        operations.attention(library, torch.zeros(1, 1, 16), cache, spans)
    with pytest.raises(ValueError, match="slots must lie within 0 to 639"):
        operations.write_tokens(
            library, cache, torch.zeros(1, 1, 16), torch.zeros(1, 1, 16), np.array([640], np.int32)
        )
