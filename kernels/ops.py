"""The operations that the engine's model is made of, dispatched to what is fastest: today PyTorch's CPU operations.

Faster kernels enter behind these functions; ``kernels.reference`` says what each must compute.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

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
# Up to this many query rows a sequence, sequences are padded to one batch; longer ones are prefill chunks.
SHORT_QUERY_ROWS = 8
# Contexts are padded to at most twice their own length; below this many tokens padding costs less than another batch
# (30 layers of 16 log-normal contexts: 82 ms padded to one batch, 38 ms in groups; one Zen 4 core, November 2026).
PADDED_TOGETHER_TOKENS = 256


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


def write_kv(cache: Tensor, new: Tensor, slots: Tensor) -> None:
    """Puts ``new`` ``[num_tokens, num_kv_heads, head_dim]`` into ``cache`` at ``slots`` ``[num_tokens]``.

    ``cache`` is ``[num_blocks, num_kv_heads, block_size, head_dim]``; a slot is block * block_size + offset.
    """
    block_size = cache.shape[2]
    cache[slots // block_size, :, slots % block_size] = new


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's query rows in the batch, its context length (the query included) and its block table."""

    query_start: int
    query_len: int
    context_len: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class _ShortQueries:
    """Sequences of few query rows, padded to one batch. All tensors are shared by every layer of a step."""

    rows: Tensor  # [batch * query_len]: batch rows of the queries, padding repeats a row
    kept: Tensor  # [num_rows]: which of the padded rows are real
    targets: Tensor  # [num_rows]: the batch rows that the real ones go back to
    gather: Tensor  # [batch * num_kv_heads * num_blocks]: rows of the cache viewed as [block * head, size * dim]
    mask: Tensor  # [batch, 1, query_len, context] additive
    num_sequences: int
    query_len: int


@dataclass(frozen=True, slots=True)
class _LongQuery:
    """One prefill chunk."""

    span: Span
    gather: Tensor  # [num_kv_heads * num_blocks]
    mask: Tensor | None  # [query_len, context_len] bool; None: the chunk starts the sequence


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Everything about a step's attention that does not depend on the layer."""

    short: tuple[_ShortQueries, ...]
    long: tuple[_LongQuery, ...]


def plan_attention(spans: Sequence[Span], num_kv_heads: int, block_size: int) -> AttentionPlan:
    """Lays out one step's attention, once for all layers."""
    short = [s for s in spans if s.query_len <= SHORT_QUERY_ROWS]
    long = [s for s in spans if s.query_len > SHORT_QUERY_ROWS]
    return AttentionPlan(
        tuple(_plan_short(group, num_kv_heads, block_size) for group in _alike(short, block_size)),
        tuple(_plan_long(s, num_kv_heads) for s in long),
    )


def _alike(spans: Sequence[Span], block_size: int) -> list[list[Span]]:
    """Groups that waste little when padded: plain decode apart from drafts, contexts within a factor of 2."""
    groups: list[list[Span]] = []
    limit_blocks = 0
    for span in sorted(spans, key=lambda s: (s.query_len > 1, len(s.block_ids))):
        num_blocks = len(span.block_ids)
        apart = not groups or (groups[-1][0].query_len > 1) != (span.query_len > 1)
        if apart or num_blocks > limit_blocks:
            groups.append([])
            limit_blocks = max(2 * num_blocks, -(-PADDED_TOGETHER_TOKENS // block_size))
        groups[-1].append(span)
    return groups


def _plan_short(spans: Sequence[Span], num_kv_heads: int, block_size: int) -> _ShortQueries:
    query_len = max(s.query_len for s in spans)
    num_blocks = max(len(s.block_ids) for s in spans)
    tables = torch.zeros((len(spans), num_blocks), dtype=torch.int64)
    rows: list[int] = []
    kept: list[int] = []
    targets: list[int] = []
    for index, span in enumerate(spans):
        tables[index, : len(span.block_ids)] = torch.tensor(span.block_ids)
        padding = query_len - span.query_len
        rows += [span.query_start] * padding + list(range(span.query_start, span.query_start + span.query_len))
        kept += range(index * query_len + padding, (index + 1) * query_len)
        targets += range(span.query_start, span.query_start + span.query_len)
    heads = torch.arange(num_kv_heads)
    gather = (tables[:, None, :] * num_kv_heads + heads[None, :, None]).flatten()
    contexts = torch.tensor([s.context_len for s in spans])
    # Padding rows come first, so that row r of query_len stands at position context_len - query_len + r.
    limits = (contexts[:, None] - query_len + 1 + torch.arange(query_len)[None, :]).clamp(min=1)
    seen = torch.arange(num_blocks * block_size)[None, None, :] < limits[:, :, None]
    mask = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))[:, None]
    return _ShortQueries(
        torch.tensor(rows), torch.tensor(kept), torch.tensor(targets), gather, mask, len(spans), query_len
    )


def _plan_long(span: Span, num_kv_heads: int) -> _LongQuery:
    heads = torch.arange(num_kv_heads)
    gather = (torch.tensor(span.block_ids)[None, :] * num_kv_heads + heads[:, None]).flatten()
    past = span.context_len - span.query_len
    if past == 0:
        return _LongQuery(span, gather, None)
    positions = past + torch.arange(span.query_len)
    return _LongQuery(span, gather, torch.arange(span.context_len)[None, :] <= positions[:, None])


def paged_attention(query: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan) -> Tensor:
    """Causal attention of every sequence over its pages.

    Args:
        query: ``[num_tokens, num_heads, head_dim]``.
        keys: One layer's cache, ``[num_blocks, num_kv_heads, block_size, head_dim]``.
        values: The same shape.
        plan: From ``plan_attention``.

    Returns:
        ``[num_tokens, num_heads, head_dim]`` in the query's type.
    """
    out = torch.empty_like(query)
    for short in plan.short:
        out[short.targets] = _attend_short(query, keys, values, short)
    for long in plan.long:
        rows = slice(long.span.query_start, long.span.query_start + long.span.query_len)
        out[rows] = _attend_long(query[rows], keys, values, long)
    return out


def _gathered(cache: Tensor, gather: Tensor, num_sequences: int) -> Tensor:
    """Pages as ``[num_sequences, num_kv_heads, num_blocks * block_size, head_dim]``, one copy."""
    _, num_kv_heads, block_size, head_dim = cache.shape
    pages = cache.view(-1, block_size * head_dim).index_select(0, gather)
    return pages.view(num_sequences, num_kv_heads, -1, head_dim)


def _attend_short(query: Tensor, keys: Tensor, values: Tensor, plan: _ShortQueries) -> Tensor:
    num_heads, head_dim = query.shape[1:]
    k = _gathered(keys, plan.gather, plan.num_sequences)
    v = _gathered(values, plan.gather, plan.num_sequences)
    num_kv_heads = k.shape[1]
    q = query[plan.rows].view(plan.num_sequences, plan.query_len, num_kv_heads, -1, head_dim)
    # The query heads of one KV head become rows of one product: [batch, kv_head, group * query, head_dim].
    q = q.permute(0, 2, 3, 1, 4).reshape(plan.num_sequences, num_kv_heads, -1, head_dim)
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * head_dim**-0.5
    group = num_heads // num_kv_heads
    scores = scores.view(plan.num_sequences, num_kv_heads, group, plan.query_len, -1) + plan.mask[:, None]
    weights = torch.softmax(scores, dim=-1).to(v.dtype).view(plan.num_sequences, num_kv_heads, -1, k.shape[2])
    mixed = torch.matmul(weights, v).view(plan.num_sequences, num_heads, plan.query_len, head_dim)
    return mixed.transpose(1, 2).reshape(-1, num_heads, head_dim)[plan.kept]


def _attend_long(query: Tensor, keys: Tensor, values: Tensor, plan: _LongQuery) -> Tensor:
    k = _gathered(keys, plan.gather, 1)[:, :, : plan.span.context_len]
    v = _gathered(values, plan.gather, 1)[:, :, : plan.span.context_len]
    q = query.transpose(0, 1)[None]
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=plan.mask, is_causal=plan.mask is None, enable_gqa=True)
    return mixed[0].transpose(0, 1)
