"""A whole native step against a plain float32 model over the same stored weights, step after step.

The plain model rounds activations before each product as the kernels do, so that what is left is float32's order of
summation, the rare activation that rounds to its neighbour, and the cache's own rounding, which both do alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from trimtab.kernels import reference
from trimtab.kernels.attention import Span
from trimtab.kernels.cpu.cache import CacheViews
from trimtab.kernels.cpu.decoder import Decoder, DecoderBatch, DecoderLayer, DecoderShape, DecoderWeights
from trimtab.kernels.cpu.library import Library
from trimtab.kernels.cpu.panels import PANEL_ROWS, Panels, pack_bf16, pack_int4, pack_int8, round_to_int8
from trimtab.kernels.kv_cache import BlockSlot, KVType, dequantize, quantize
from trimtab.kernels.packing import round_to_int4

BLOCK_SIZE = 16
SHAPES = {
    "tiny": DecoderShape(64, 4, 2, 16, 128, 512, 1e-5, 10_000.0),
    "odd": DecoderShape(72, 3, 1, 48, 100, 517, 1e-6, 500_000.0),
    "wide heads": DecoderShape(96, 5, 5, 128, 33, 40, 1e-5, 10_000.0),
}


def stored(dense: Tensor, kind: str, row_multiple: int) -> tuple[Panels, Tensor]:
    """A weight as panels, and what these mean."""
    columns = dense.shape[1]
    padded = torch.nn.functional.pad(dense, (0, -columns % 32))
    match kind:
        case "bf16":
            return pack_bf16(dense, row_multiple), dense.bfloat16().float()
        case "int8":
            values, scales = round_to_int8(padded)
            meant = values.view(len(dense), -1, 32) * scales[..., None]
            return pack_int8(values, scales, row_multiple), meant.view(padded.shape)[:, :columns]
        case _:
            quants, scales, minima = round_to_int4(padded)
            scales, minima = scales.half().float(), minima.half().float()
            meant = quants.view(len(dense), -1, 32) * scales[..., None] + minima[..., None]
            # The padding's own minimum would be added where the model has no column.
            return pack_int4(quants, scales, minima, row_multiple), meant.view(padded.shape)


@dataclass
class PlainLayer:
    attention_norm: Tensor
    mlp_norm: Tensor
    qkv: Tensor
    output: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass
class Plain:
    """The same model, one sequence at a time, its keys and values kept as lists."""

    shape: DecoderShape
    layers: list[PlainLayer]
    final_norm: Tensor
    table: Tensor
    kinds: list[str]
    kv_type: KVType
    kept: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)

    def product(self, x: Tensor, weight: Tensor, kind: str) -> Tensor:
        if kind != "bf16":
            padding = -x.shape[1] % 32
            x = reference.round_activations(torch.nn.functional.pad(x, (0, padding)))
            weight = torch.nn.functional.pad(weight, (0, x.shape[1] - weight.shape[1]))
        return x @ weight.T

    def stored(self, x: Tensor) -> Tensor:
        values, scales = quantize(x, self.kv_type)
        return dequantize(values.bfloat16() if scales is None else values, scales, torch.float32)

    def forward(self, sequence: int, token_ids: list[int]) -> Tensor:
        shape = self.shape
        kept = self.kept.setdefault(sequence, [])
        past = kept[0][0].shape[0] if kept else 0
        positions = torch.arange(past, past + len(token_ids))
        hidden = self.table[token_ids]
        for index, (layer, kind) in enumerate(zip(self.layers, self.kinds, strict=True)):
            normed = reference.rms_norm(hidden, layer.attention_norm, shape.rms_norm_eps)
            qkv = self.product(normed, layer.qkv, kind).view(len(token_ids), -1, shape.head_dim)
            q, k, v = qkv.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
            q, k = (reference.rotate(x, positions, shape.rope_theta) for x in (q, k))
            new = (self.stored(k), self.stored(v))
            if index == len(kept):
                kept.append(new)
            else:
                kept[index] = (torch.cat((kept[index][0], new[0])), torch.cat((kept[index][1], new[1])))
            mixed = reference.attention(q, *kept[index], past).flatten(1)
            hidden = hidden + self.product(mixed, layer.output, kind)
            normed = reference.rms_norm(hidden, layer.mlp_norm, shape.rms_norm_eps)
            gate_up = torch.cat([self.product(normed, w, kind) for w in (layer.gate, layer.up)], dim=1)
            hidden = hidden + self.product(reference.swiglu(gate_up), layer.down, kind)
        normed = reference.rms_norm(hidden, self.final_norm, shape.rms_norm_eps)
        return self.product(normed, self.table, "int8")


def make_pair(shape: DecoderShape, kinds: list[str], kv_type: KVType) -> tuple[DecoderWeights, Plain]:
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * (2.0 / columns) ** 0.5

    def norm() -> Tensor:
        return 1 + 0.1 * torch.randn(shape.hidden_size, generator=generator)

    native, plain = [], []
    queries = shape.num_heads * shape.head_dim
    for kind in kinds:
        qkv, qkv_meant = stored(
            matrix(queries + 2 * shape.num_kv_heads * shape.head_dim, shape.hidden_size), kind, 16
        )
        output, output_meant = stored(matrix(shape.hidden_size, queries), kind, 64)
        gate, gate_meant = stored(matrix(shape.intermediate_size, shape.hidden_size), kind, 64)
        up, up_meant = stored(matrix(shape.intermediate_size, shape.hidden_size), kind, 64)
        down, down_meant = stored(matrix(shape.hidden_size, shape.intermediate_size), kind, 64)
        norms = (norm(), norm())
        native.append(DecoderLayer(*norms, qkv, output, gate.interleaved(up), down))
        plain.append(PlainLayer(*norms, qkv_meant, output_meant, gate_meant, up_meant, down_meant))
    table, table_meant = stored(matrix(shape.vocab_size, shape.hidden_size) * 8, "int8", PANEL_ROWS)
    final_norm = norm()
    return (
        DecoderWeights(native, final_norm, table, table),
        Plain(shape, plain, final_norm, table_meant, kinds, kv_type),
    )


def new_cache(shape: DecoderShape, num_layers: int, kv_type: KVType, num_blocks: int) -> CacheViews:
    rows = (num_layers, 2, num_blocks, shape.num_kv_heads, BLOCK_SIZE)
    match kv_type:
        case KVType.FULL:
            blocks = (torch.zeros(*rows, shape.head_dim, dtype=torch.bfloat16), None)
        case KVType.INT8:
            blocks = (torch.zeros(*rows, shape.head_dim, dtype=torch.int8), torch.zeros(rows, dtype=torch.float16))
        case _:
            values = torch.zeros(*rows, shape.head_dim // 2, dtype=torch.uint8)
            blocks = (values, torch.zeros(*rows, 2, dtype=torch.float16))
    return CacheViews({kv_type: blocks}, BLOCK_SIZE, kv_type)


# What each of three sequences is fed, step after step: prefill in chunks, decode, drafts; some sit a step out.
STEPS = [(5, 33, 1), (1, 20, 1), (4, 1, 0), (1, 0, 40), (1, 1, 1), (8, 7, 1)]


@pytest.mark.parametrize("kv_type", KVType)
@pytest.mark.parametrize("kinds", [["int4", "int4"], ["int8", "bf16", "int4"], ["bf16"]], ids="-".join)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_steps(library: Library, shape: DecoderShape, kinds: list[str], kv_type: KVType, num_threads: int) -> None:
    weights, plain = make_pair(shape, kinds, kv_type)
    decoder = Decoder(library, shape, weights, num_threads)
    cache = new_cache(shape, len(kinds), kv_type, 16)
    rng = np.random.default_rng(0)
    tables = np.split(rng.permutation(15), 3)
    lengths = [0, 0, 0]
    errors = []
    for counts in STEPS:
        token_ids, positions, slots, spans, expected = [], [], [], [], []
        for sequence, count in enumerate(counts):
            if count == 0:
                continue
            fed = rng.integers(0, shape.vocab_size, count).tolist()
            stop = lengths[sequence] + count
            table = tuple(BlockSlot(kv_type, int(n)) for n in tables[sequence])
            spans.append(Span(len(token_ids), count, stop, table))
            expected.append(plain.forward(sequence, fed))
            token_ids += fed
            positions += range(lengths[sequence], stop)
            slots += [
                table[p // BLOCK_SIZE].number * BLOCK_SIZE + p % BLOCK_SIZE for p in range(lengths[sequence], stop)
            ]
            lengths[sequence] = stop
        wanted = rng.permutation(len(token_ids))[: rng.integers(1, len(token_ids) + 1)]
        arrays = (np.array(x, np.int32) for x in (token_ids, positions, slots))
        output = decoder.step(DecoderBatch(*arrays, spans, wanted.astype(np.int32), True), cache)
        found, meant = output.logits, torch.cat(expected)[wanted]
        assert found is not None
        errors += ((found - meant).norm(dim=1) / meant.norm(dim=1)).tolist()
        assert output.best == found.argmax(dim=-1).tolist()
    # An activation that lies between two int8 steps may go to either of them, and moves its row by a hundredth;
    # without one, a row is exact.
    assert max(errors) < 0.08
    assert min(errors) < 1e-6


def test_without_logits_the_best_tokens_are_the_same(library: Library) -> None:
    shape = SHAPES["odd"]
    weights, _ = make_pair(shape, ["int4"], KVType.FULL)
    decoder = Decoder(library, shape, weights, 2)
    span = Span(0, 20, 20, (BlockSlot(KVType.FULL, 1), BlockSlot(KVType.FULL, 0)))
    rows = np.arange(20, dtype=np.int32)
    batch = [rows * 7, rows, (rows + 16) % 32, [span], rows]
    cache = new_cache(shape, 1, KVType.FULL, 2)
    with_logits, without = (decoder.step(DecoderBatch(*batch, wants), cache) for wants in (True, False))
    assert without.logits is None
    assert without.best == with_logits.best


def test_the_first_of_equal_logits_is_the_best(library: Library) -> None:
    shape = SHAPES["tiny"]
    weights, _ = make_pair(shape, ["bf16"], KVType.FULL)
    same = pack_bf16(torch.ones(shape.vocab_size, shape.hidden_size))
    decoder = Decoder(library, shape, DecoderWeights(weights.layers, weights.final_norm, same, same), 3)
    one = np.array([0], np.int32)
    span = Span(0, 1, 1, (BlockSlot(KVType.FULL, 0),))
    batch = DecoderBatch(one, one, one, [span], one, False)
    assert decoder.step(batch, new_cache(shape, 1, KVType.FULL, 1)).best == [0]


def _with(index: int, value: object) -> Callable[[list[object]], list[object]]:
    return lambda fields: [*fields[:index], value, *fields[index + 1 :]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_with(0, np.array([512], np.int32)), "token_ids must lie within 0 to 511"),
        (_with(1, np.array([-1], np.int32)), "positions must lie within"),
        (_with(2, np.array([16], np.int32)), "slots must lie within 0 to 15"),
        (_with(4, np.array([1], np.int32)), "logit_rows must lie within 0 to 0"),
        (_with(0, np.array([0], np.int64)), "token_ids must be a contiguous int32 vector"),
        (_with(1, np.array([0, 0], np.int32)), "differ in length"),
        (_with(3, []), "spans must cover"),
    ],
)
def test_a_batch_that_points_outside_is_refused(
    library: Library, change: Callable[[list[object]], list[object]], message: str
) -> None:
    shape = SHAPES["tiny"]
    weights, _ = make_pair(shape, ["int4"], KVType.FULL)
    decoder = Decoder(library, shape, weights, 1)
    one = np.array([0], np.int32)
    fields = change([one, one, one, [Span(0, 1, 1, (BlockSlot(KVType.FULL, 0),))], one, True])
    with pytest.raises(ValueError, match=message):
        decoder.step(DecoderBatch(*fields), new_cache(shape, 1, KVType.FULL, 1))  # type: ignore[arg-type]


def test_weights_that_do_not_fit_are_refused(library: Library) -> None:
    shape = SHAPES["tiny"]
    weights, _ = make_pair(shape, ["int4"], KVType.FULL)
    wrong = DecoderWeights(weights.layers, weights.final_norm, weights.embedding, pack_bf16(torch.ones(16, 64)))
    with pytest.raises(ValueError, match="head is 16 x 64 with its padding; expected 512 x 64"):
        Decoder(library, shape, wrong, 1)
