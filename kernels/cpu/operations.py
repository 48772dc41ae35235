"""The native operations one by one, on one thread: for tests and measurements. The engine calls ``decoder``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trimtab.kernels.attention import Span
from trimtab.kernels.cpu.cache import CacheViews, Ints, check_spans, check_within, flatten_spans
from trimtab.kernels.cpu.library import BatchStruct, Library, WeightStruct
from trimtab.kernels.cpu.panels import PANEL_ROWS, Panels


def linear(library: Library, x: Tensor, weight: Panels) -> Tensor:
    """``x @ weight.T``: ``[num_tokens, columns]`` float32, its columns padded, to ``[num_tokens, padded rows]``."""
    padded = torch.zeros(x.shape[0], weight.columns)
    padded[:, : x.shape[1]] = x
    out = torch.empty(x.shape[0], weight.num_panels * PANEL_ROWS)
    library.call("linear", _struct(weight), padded.data_ptr(), len(x), out.data_ptr())
    return out


def look_up(library: Library, weight: Panels, row: int) -> Tensor:
    """One output row as ``[columns]`` float32."""
    if not 0 <= row < weight.num_panels * PANEL_ROWS:
        raise ValueError(f"row {row} of {weight.num_panels * PANEL_ROWS}")
    out = torch.empty(weight.columns)
    library.call("look_up", _struct(weight), row, out.data_ptr())
    return out


def write_tokens(library: Library, cache: CacheViews, keys: Tensor, values: Tensor, slots: Ints) -> None:
    """Puts keys and values ``[num_tokens, num_kv_heads, head_dim]`` float32 into the only layer of ``cache``."""
    num_tokens, num_kv_heads, head_dim = keys.shape
    if values.shape != keys.shape or len(slots) != num_tokens:
        raise ValueError("keys, values and slots differ in length")
    struct = cache.struct(1, num_kv_heads, head_dim)
    check_within("slots", slots, struct.num_blocks[cache.write_type] * cache.block_size)
    for kind, rows in enumerate((keys.float().contiguous(), values.float().contiguous())):
        pointer = rows.data_ptr()
        library.call("write_tokens", struct, num_kv_heads, head_dim, kind, slots.ctypes.data, num_tokens, pointer)


def attention(library: Library, query: Tensor, cache: CacheViews, spans: Sequence[Span]) -> Tensor:
    """Causal attention over the only layer of ``cache``.

    ``query`` and the result are ``[num_tokens, num_heads, head_dim]`` float32.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = next(iter(cache.blocks.values()))[0].shape[3]
    struct = cache.struct(1, num_kv_heads, head_dim)
    rows, tables = flatten_spans(spans)
    check_spans(rows, tables, num_tokens, struct)
    batch = BatchStruct(num_tokens=num_tokens, num_spans=len(rows))
    batch.spans, batch.tables = rows.ctypes.data, tables.ctypes.data
    query, out = query.float().contiguous(), torch.empty(query.shape)
    shape = (num_kv_heads, num_heads // num_kv_heads, head_dim)
    library.call("attention", struct, batch, *shape, query.data_ptr(), out.data_ptr())
    return out


def _struct(weight: Panels) -> WeightStruct:
    return WeightStruct(weight.bytes.data_ptr(), weight.columns, weight.num_panels, weight.format)
