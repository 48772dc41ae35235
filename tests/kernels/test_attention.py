"""Paged attention against plain attention over contiguous keys and values, with blocks of every mixture of types.

What a compressed block means is what ``dequantize`` says, so the reference attends to that, and the tolerances are
those of the arithmetic alone.
"""

from __future__ import annotations

import pytest
import torch
from tests.kernels.test_ops import BF16, FP32, close
from torch import Tensor

from trimtab.kernels import reference
from trimtab.kernels.attention import Span, paged_attention, plan_attention
from trimtab.kernels.kv_cache import BlockSlot, KVType, PagedTensor, TypedBlocks, dequantize, quantize, write_tokens

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 6, 2, 16, 8

LENGTHS = [
    [(1, 1)],
    [(17, 1), (1, 1), (40, 1), (8, 1)],
    [(30, 4), (9, 1), (8, 8)],  # drafts to verify beside plain decode
    [(50, 50)],
    [(50, 20), (33, 33), (5, 1), (64, 9)],
    [(3, 3), (100, 1)],
    [(700, 1), (5, 1), (300, 1), (256, 1), (520, 3), (4, 2), (260, 1)],  # several groups of alike lengths
]
MIXTURES = [tuple(KVType), (KVType.FULL,), (KVType.INT8,), (KVType.INT4,), (KVType.FULL, KVType.INT8)]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def empty_cache(num_blocks: int, dtype: torch.dtype) -> dict[KVType, TypedBlocks]:
    """Full of values that would show in any result."""
    shape = (num_blocks, NUM_KV_HEADS, BLOCK_SIZE)
    return {
        KVType.FULL: TypedBlocks(torch.full((*shape, HEAD_DIM), 1e4).to(dtype), None),
        KVType.INT8: TypedBlocks(
            torch.full((*shape, HEAD_DIM), 127, dtype=torch.int8), torch.full(shape, 1e2, dtype=torch.float16)
        ),
        KVType.INT4: TypedBlocks(
            torch.full((*shape, HEAD_DIM // 2), 255, dtype=torch.uint8),
            torch.full((*shape, 2), 1e2, dtype=torch.float16),
        ),
    }


def paged_case(
    lengths: list[tuple[int, int]], dtype: torch.dtype, mixture: tuple[KVType, ...] = (KVType.FULL,)
) -> tuple[Tensor, PagedTensor, PagedTensor, list[Span], Tensor]:
    """(context, query) lengths to query, caches, spans and the expected output. Blocks are shuffled."""
    needed = [-(-context // BLOCK_SIZE) for context, _ in lengths]
    order = torch.randperm(sum(needed) + 3).tolist()
    keys, values = empty_cache(len(order), dtype), empty_cache(len(order), dtype)
    query = torch.randn(sum(q for _, q in lengths), NUM_HEADS, HEAD_DIM).to(dtype)
    spans, expected, start = [], [], 0
    for (context, query_len), count in zip(lengths, needed, strict=True):
        types = [mixture[i] for i in torch.randint(len(mixture), (count,)).tolist()]
        table = [BlockSlot(kv_type, order.pop()) for kv_type in types]
        k, v = (torch.randn(context, NUM_KV_HEADS, HEAD_DIM).to(dtype) for _ in range(2))
        for cache, x in ((keys, k), (values, v)):
            for position in range(context):
                kv_type, number = table[position // BLOCK_SIZE]
                slots = torch.tensor([number * BLOCK_SIZE + position % BLOCK_SIZE])
                write_tokens(cache[kv_type], kv_type, x[position : position + 1], slots)
                x[position] = dequantize(*quantize(x[position], kv_type), dtype)
        spans.append(Span(start, query_len, context, table))
        expected.append(reference.attention(query[start : start + query_len], k, v, context - query_len))
        start += query_len
    return query, keys, values, spans, torch.cat(expected)


def stored(*caches: PagedTensor) -> list[Tensor]:
    return [t.clone() for cache in caches for b in cache.values() for t in (b.values, b.scales) if t is not None]


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_paged_attention(dtype: torch.dtype, mixture: tuple[KVType, ...], lengths: list[tuple[int, int]]) -> None:
    query, keys, values, spans, expected = paged_case(lengths, dtype, mixture)
    before = [query.clone(), *stored(keys, values)]
    found = paged_attention(query, keys, values, plan_attention(spans, NUM_KV_HEADS, BLOCK_SIZE))
    close(found, expected, dtype)
    assert all(torch.equal(a, b) for a, b in zip(before, [query, *stored(keys, values)], strict=True))


@pytest.mark.parametrize("mixture", MIXTURES)
def test_attention_of_one_sequence_does_not_depend_on_the_others(mixture: tuple[KVType, ...]) -> None:
    query, keys, values, spans, _ = paged_case([(20, 1), (90, 1), (4, 1)], FP32, mixture)
    together = paged_attention(query, keys, values, plan_attention(spans, NUM_KV_HEADS, BLOCK_SIZE))
    for span in spans:
        alone = Span(0, 1, span.context_len, span.table)
        row = slice(span.query_start, span.query_start + 1)
        found = paged_attention(query[row], keys, values, plan_attention([alone], NUM_KV_HEADS, BLOCK_SIZE))
        close(found, together[row], FP32)
