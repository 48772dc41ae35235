"""Causal attention over the paged cache, with PyTorch's CPU operations; native kernels enter behind them.

``plan_attention`` lays a step out once; ``paged_attention`` then runs it for every layer. ``kernels.reference`` says
what it must compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trimtab.kernels.kv_cache import BlockSlot, KVType, PagedTensor, read_rows

# Up to this many query rows a sequence, sequences are padded to one batch; longer ones are prefill chunks.
SHORT_QUERY_ROWS = 8
# Contexts are padded to at most twice their own length; below this many tokens padding costs less than another batch
# (30 layers of 16 log-normal contexts: 82 ms padded to one batch, 38 ms in groups; one Zen 4 core, November 2026).
PADDED_TOGETHER_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's query rows in the batch, its context length (the query included) and its block table."""

    query_start: int
    query_len: int
    context_len: int
    table: Sequence[BlockSlot]


@dataclass(frozen=True, slots=True)
class _Part:
    """The blocks of one type among those that are gathered."""

    kv_type: KVType
    rows: Tensor  # [num_rows]: block * num_kv_heads + head, among the blocks of this type
    targets: Tensor | None  # [num_rows]: where they go; ``None``: all, in order


@dataclass(frozen=True, slots=True)
class _Gather:
    """Which rows of the cache make ``[num_sequences, num_kv_heads, num_blocks * block_size, head_dim]``."""

    parts: tuple[_Part, ...]
    num_sequences: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class _ShortQueries:
    """Sequences of few query rows, padded to one batch. All tensors are shared by every layer of a step."""

    rows: Tensor  # [batch * query_len]: batch rows of the queries, padding repeats a row
    kept: Tensor  # [num_rows]: which of the padded rows are real
    targets: Tensor  # [num_rows]: the batch rows that the real ones go back to
    gather: _Gather
    mask: Tensor  # [batch, 1, query_len, context] additive
    query_len: int


@dataclass(frozen=True, slots=True)
class _LongQuery:
    """One prefill chunk."""

    span: Span
    gather: _Gather
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


def paged_attention(query: Tensor, keys: PagedTensor, values: PagedTensor, plan: AttentionPlan) -> Tensor:
    """Causal attention of every sequence over its pages.

    Args:
        query: ``[num_tokens, num_heads, head_dim]``.
        keys: One layer's keys.
        values: One layer's values.
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


def _alike(spans: Sequence[Span], block_size: int) -> list[list[Span]]:
    """Groups that waste little when padded: plain decode apart from drafts, contexts within a factor of 2."""
    groups: list[list[Span]] = []
    limit_blocks = 0
    for span in sorted(spans, key=lambda s: (s.query_len > 1, len(s.table))):
        num_blocks = len(span.table)
        apart = not groups or (groups[-1][0].query_len > 1) != (span.query_len > 1)
        if apart or num_blocks > limit_blocks:
            groups.append([])
            limit_blocks = max(2 * num_blocks, -(-PADDED_TOGETHER_TOKENS // block_size))
        groups[-1].append(span)
    return groups


def _plan_gather(tables: Sequence[Sequence[BlockSlot]], num_kv_heads: int) -> _Gather:
    num_blocks = max(map(len, tables))
    kv_types = {slot.kv_type for table in tables for slot in table}
    heads = torch.arange(num_kv_heads)
    if len(kv_types) == 1:
        indices = torch.zeros((len(tables), num_blocks), dtype=torch.int64)
        for row, table in enumerate(tables):
            indices[row, : len(table)] = torch.tensor([slot.number for slot in table])
        rows = indices[:, None, :] * num_kv_heads + heads[:, None]  # [num_sequences, num_kv_heads, num_blocks]
        part = _Part(kv_types.pop(), rows.flatten(), None)
        return _Gather((part,), len(tables), num_blocks)
    parts = []
    for kv_type in sorted(kv_types):
        placed = [
            (slot.number, row, column)
            for row, table in enumerate(tables)
            for column, slot in enumerate(table)
            if slot.kv_type is kv_type
        ]
        index, row, column = torch.tensor(placed).T[..., None]  # each [num_placed, 1], a head beside it
        targets = (row * num_kv_heads + heads) * num_blocks + column
        parts.append(_Part(kv_type, (index * num_kv_heads + heads).flatten(), targets.flatten()))
    return _Gather(tuple(parts), len(tables), num_blocks)


def _plan_short(spans: Sequence[Span], num_kv_heads: int, block_size: int) -> _ShortQueries:
    query_len = max(s.query_len for s in spans)
    rows: list[int] = []
    kept: list[int] = []
    targets: list[int] = []
    for index, span in enumerate(spans):
        padding = query_len - span.query_len
        rows += [span.query_start] * padding + list(range(span.query_start, span.query_start + span.query_len))
        kept += range(index * query_len + padding, (index + 1) * query_len)
        targets += range(span.query_start, span.query_start + span.query_len)
    gather = _plan_gather([s.table for s in spans], num_kv_heads)
    contexts = torch.tensor([s.context_len for s in spans])
    # Padding rows come first, so that row r of query_len stands at position context_len - query_len + r.
    limits = (contexts[:, None] - query_len + 1 + torch.arange(query_len)[None, :]).clamp(min=1)
    seen = torch.arange(gather.num_blocks * block_size)[None, None, :] < limits[:, :, None]
    mask = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))[:, None]
    return _ShortQueries(torch.tensor(rows), torch.tensor(kept), torch.tensor(targets), gather, mask, query_len)


def _plan_long(span: Span, num_kv_heads: int) -> _LongQuery:
    gather = _plan_gather([span.table], num_kv_heads)
    past = span.context_len - span.query_len
    if past == 0:
        return _LongQuery(span, gather, None)
    positions = past + torch.arange(span.query_len)
    return _LongQuery(span, gather, torch.arange(span.context_len)[None, :] <= positions[:, None])


def _gathered(cache: PagedTensor, gather: _Gather, num_kv_heads: int, dtype: torch.dtype) -> Tensor:
    """The pages as ``[num_sequences, num_kv_heads, num_blocks * block_size, head_dim]`` in ``dtype``, one copy."""
    shape = (gather.num_sequences, num_kv_heads, gather.num_blocks)
    if gather.parts[0].targets is None:
        pages = read_rows(cache[gather.parts[0].kv_type], gather.parts[0].rows, dtype)
        return pages.view(*shape, *pages.shape[1:]).flatten(2, 3)
    whole: Tensor | None = None
    for part in gather.parts:
        pages = read_rows(cache[part.kv_type], part.rows, dtype)
        if whole is None:  # zeros, because padding is read
            whole = pages.new_zeros((shape[0] * shape[1] * shape[2], *pages.shape[1:]))
        whole[part.targets] = pages
    assert whole is not None
    return whole.view(*shape, *whole.shape[1:]).flatten(2, 3)


def _attend_short(query: Tensor, keys: PagedTensor, values: PagedTensor, plan: _ShortQueries) -> Tensor:
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = _num_kv_heads(keys)
    k = _gathered(keys, plan.gather, num_kv_heads, query.dtype)
    v = _gathered(values, plan.gather, num_kv_heads, query.dtype)
    batch = plan.gather.num_sequences
    q = query[plan.rows].view(batch, plan.query_len, num_kv_heads, -1, head_dim)
    # The query heads of one KV head become rows of one product: [batch, kv_head, group * query, head_dim].
    q = q.permute(0, 2, 3, 1, 4).reshape(batch, num_kv_heads, -1, head_dim)
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * head_dim**-0.5
    group = num_heads // num_kv_heads
    scores = scores.view(batch, num_kv_heads, group, plan.query_len, -1) + plan.mask[:, None]
    weights = torch.softmax(scores, dim=-1).to(v.dtype).view(batch, num_kv_heads, -1, k.shape[2])
    mixed = torch.matmul(weights, v).view(batch, num_heads, plan.query_len, head_dim)
    return mixed.transpose(1, 2).reshape(-1, num_heads, head_dim)[plan.kept]


def _attend_long(query: Tensor, keys: PagedTensor, values: PagedTensor, plan: _LongQuery) -> Tensor:
    num_kv_heads = _num_kv_heads(keys)
    k = _gathered(keys, plan.gather, num_kv_heads, query.dtype)[:, :, : plan.span.context_len]
    v = _gathered(values, plan.gather, num_kv_heads, query.dtype)[:, :, : plan.span.context_len]
    q = query.transpose(0, 1)[None]
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=plan.mask, is_causal=plan.mask is None, enable_gqa=True)
    return mixed[0].transpose(0, 1)


def _num_kv_heads(cache: PagedTensor) -> int:
    return next(iter(cache.values())).values.shape[1]
