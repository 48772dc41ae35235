"""A whole Llama-architecture step in one native call: weights in panels, the paged cache, a batch of tokens.

``engine.embedded.native_model`` builds it. Everything that the native code reads by an index is checked here first.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trimtab.kernels.attention import Span
from trimtab.kernels.cpu.cache import CacheViews, Ints, check_spans, check_within, flatten_spans
from trimtab.kernels.cpu.library import BatchStruct, CacheStruct, LayerStruct, Library, ModelStruct, WeightStruct
from trimtab.kernels.cpu.panels import GROUP, PANEL_ROWS, Panels

MAX_HEAD_DIM = 256
_MAX_POSITION = 1 << 30


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes of the model, unpadded. ``rope_theta`` and ``rms_norm_eps`` have no unit."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer. Norms are ``[hidden_size]`` float32; ``gate_up`` is ``gate.interleaved(up)``."""

    attention_norm: Tensor
    mlp_norm: Tensor
    qkv: Panels
    output: Panels
    gate_up: Panels
    down: Panels


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights. ``embedding`` and ``head`` may be the same panels."""

    layers: Sequence[DecoderLayer]
    final_norm: Tensor
    embedding: Panels
    head: Panels


@dataclass(frozen=True, slots=True)
class DecoderBatch:
    """One step. Numbers are int32 arrays of one dimension, ``tables`` all spans' blocks one after the other."""

    token_ids: Ints
    positions: Ints
    slots: Ints
    spans: Sequence[Span]
    logit_rows: Ints
    wants_logits: bool


@dataclass(frozen=True, slots=True)
class DecoderOutput:
    """``best`` is each logit row's most likely token; ``logits`` ``[num_logit_rows, vocab_size]`` where wanted."""

    best: list[int]
    logits: Tensor | None


def supports(head_dim: int) -> bool:
    """Whether the native attention takes heads of this size."""
    return head_dim % PANEL_ROWS == 0 and head_dim <= MAX_HEAD_DIM


class Decoder:
    """Owns the native decoder and keeps alive what it points to. Not thread-safe: one step at a time."""

    def __init__(self, library: Library, shape: DecoderShape, weights: DecoderWeights, num_threads: int) -> None:
        """Raises ``ValueError`` where a weight does not fit the shape, ``MemoryError``."""
        self._shape = shape
        self._num_layers = len(weights.layers)
        self._library = library
        self._kept: list[object] = []
        self._bound: tuple[CacheViews, CacheStruct] | None = None
        struct = self._model(weights)
        self._handle = library.create(struct, num_threads)
        weakref.finalize(self, library.destroy, self._handle)

    def step(self, batch: DecoderBatch, cache: CacheViews) -> DecoderOutput:
        """Runs one step: keys and values enter the cache.

        Raises:
            ValueError: an index is out of range; nothing was written.
            MemoryError: no memory for a step of this size.
        """
        cache_struct = self._cache(cache)
        spans, tables = flatten_spans(batch.spans)
        self._check(batch, spans, tables, cache_struct)
        num_rows = len(batch.logit_rows)
        best = np.empty(num_rows, np.int32)
        logits = torch.empty(num_rows, self._num_logits) if batch.wants_logits else None
        struct = BatchStruct(
            len(batch.token_ids),
            len(spans),
            num_rows,
            batch.token_ids.ctypes.data,
            batch.positions.ctypes.data,
            batch.slots.ctypes.data,
            spans.ctypes.data,
            tables.ctypes.data,
            batch.logit_rows.ctypes.data,
            None if logits is None else logits.data_ptr(),
            best.ctypes.data,
        )
        self._library.call("decoder_step", self._handle, cache_struct, struct)
        return DecoderOutput(best.tolist(), None if logits is None else logits[:, : self._shape.vocab_size])

    def _model(self, weights: DecoderWeights) -> ModelStruct:
        shape = self._shape
        hidden = _rounded_up(shape.hidden_size)
        middle = _rounded_up(shape.intermediate_size)
        query = _rounded_up(shape.num_heads * shape.head_dim)
        qkv_rows = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        layers = (LayerStruct * self._num_layers)()
        for struct, layer in zip(layers, weights.layers, strict=True):
            struct.attention_norm = self._norm(layer.attention_norm)
            struct.mlp_norm = self._norm(layer.mlp_norm)
            struct.qkv = self._weight("qkv", layer.qkv, qkv_rows, hidden)
            struct.output = self._weight("output", layer.output, hidden, query)
            struct.gate_up = self._weight("gate_up", layer.gate_up, 2 * middle, hidden)
            struct.down = self._weight("down", layer.down, hidden, middle)
        vocab = -(-shape.vocab_size // PANEL_ROWS) * PANEL_ROWS
        self._num_logits = vocab
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        self._kept.append(layers)
        return ModelStruct(
            shape.hidden_size,
            self._num_layers,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.vocab_size,
            shape.rms_norm_eps,
            self._keep(shape.rope_theta**-exponents),
            self._norm(weights.final_norm),
            layers,
            self._weight("embedding", weights.embedding, vocab, hidden),
            self._weight("head", weights.head, vocab, hidden),
        )

    def _keep(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _norm(self, norm: Tensor) -> int:
        if norm.shape != (self._shape.hidden_size,):
            raise ValueError(f"a norm has shape {tuple(norm.shape)}; expected ({self._shape.hidden_size},)")
        padded = torch.zeros(_rounded_up(len(norm)))
        padded[: len(norm)] = norm
        return self._keep(padded)

    def _weight(self, name: str, panels: Panels, num_rows: int, columns: int) -> WeightStruct:
        found = (panels.num_panels * PANEL_ROWS, panels.columns)
        if found != (num_rows, columns) or panels.bytes.dtype is not torch.uint8:
            raise ValueError(f"{name} is {found[0]} x {found[1]} with its padding; expected {num_rows} x {columns}")
        return WeightStruct(self._keep(panels.bytes.contiguous()), columns, panels.num_panels, panels.format)

    def _cache(self, cache: CacheViews) -> CacheStruct:
        if self._bound is None or self._bound[0] is not cache:
            struct = cache.struct(self._num_layers, self._shape.num_kv_heads, self._shape.head_dim)
            self._bound = (cache, struct)
        return self._bound[1]

    def _check(self, batch: DecoderBatch, spans: Ints, tables: Ints, cache: CacheStruct) -> None:
        num_tokens = len(batch.token_ids)
        check_within("token_ids", batch.token_ids, self._shape.vocab_size)
        check_within("positions", batch.positions, _MAX_POSITION)
        check_within("slots", batch.slots, cache.num_blocks[cache.write_type] * cache.block_size)
        check_within("logit_rows", batch.logit_rows, num_tokens)
        if not len(batch.positions) == len(batch.slots) == num_tokens:
            raise ValueError("token_ids, positions and slots differ in length")
        check_spans(spans, tables, num_tokens, cache)


def _rounded_up(columns: int) -> int:
    return -(-columns // (2 * GROUP)) * 2 * GROUP
