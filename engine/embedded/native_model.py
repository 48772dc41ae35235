"""A Llama-architecture model on the native CPU kernels: one call a step.

``int4`` reuses the file's own 4-bit and 8-bit blocks exactly; what a file stores otherwise is rounded in the same
groups of 32. The head and the embeddings are never int4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trimtab.engine.embedded.batch import StepBatch, StepOutput
from trimtab.engine.embedded.config import ModelConfig
from trimtab.engine.embedded.gguf_blocks import Blocks4, Blocks8
from trimtab.engine.embedded.kv.pool import KVPool
from trimtab.engine.embedded.weights import EMBEDDING, FINAL_NORM, HEAD, WeightSource
from trimtab.kernels.cpu.cache import CacheViews
from trimtab.kernels.cpu.decoder import (
    Decoder,
    DecoderBatch,
    DecoderLayer,
    DecoderShape,
    DecoderWeights,
    supports,
)
from trimtab.kernels.cpu.library import Library
from trimtab.kernels.cpu.panels import PANEL_ROWS, Panels, pack_bf16, pack_int4, pack_int8, round_to_int8
from trimtab.kernels.packing import round_to_int4

QUANTIZATIONS = ("bf16", "int8", "int4")
_PADDED_ROWS = 64  # where a product's outputs are another's inputs


@dataclass(frozen=True, slots=True)
class NativeKernels:
    """What the native model runs on."""

    library: Library
    num_threads: int


def is_native(config: ModelConfig, quantization: str) -> bool:
    """Whether the native kernels run this model."""
    return quantization in QUANTIZATIONS and supports(config.head_dim)


class NativeLlama:
    """Implements ``Model``."""

    def __init__(self, source: WeightSource, quantization: str, kernels: NativeKernels) -> None:
        """Converts ``source`` a tensor at a time. Raises ``ModelFileError``, ``MemoryError``."""
        self.config = config = source.config
        self.kernels = kernels.library.level.name
        self.kv_dtype = torch.bfloat16
        shape = DecoderShape(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.intermediate_size,
            config.vocab_size,
            config.rms_norm_eps,
            config.rope_theta,
        )
        self._decoder = Decoder(kernels.library, shape, _weights(source, quantization), kernels.num_threads)
        self._seen: tuple[KVPool, CacheViews] | None = None

    def forward(self, batch: StepBatch, kv: KVPool) -> StepOutput:
        """Runs one step; its keys and values enter ``kv``."""
        step = DecoderBatch(
            batch.token_ids, batch.positions, batch.slots, batch.spans, batch.logit_rows, batch.wants_logits
        )
        output = self._decoder.step(step, self._views(kv))
        return StepOutput(output.best, output.logits)

    def _views(self, kv: KVPool) -> CacheViews:
        if self._seen is None or self._seen[0] is not kv:
            self._seen = (kv, CacheViews(kv.blocks, kv.layout.block_size, kv.layout.write_type))
        return self._seen[1]


def _weights(source: WeightSource, quantization: str) -> DecoderWeights:
    packer = _Packer(source, quantization)
    table_packer = _Packer(source, "int8" if quantization == "int4" else quantization)
    embedding = table_packer.pack([EMBEDDING])
    return DecoderWeights(
        [_layer(source, f"model.layers.{i}", packer) for i in range(source.config.num_layers)],
        source.dense(FINAL_NORM),
        embedding,
        embedding if source.config.tied_head else table_packer.pack([HEAD]),
    )


def _layer(source: WeightSource, prefix: str, packer: _Packer) -> DecoderLayer:
    gate, up = (packer.pack([f"{prefix}.mlp.{p}_proj"], _PADDED_ROWS) for p in ("gate", "up"))
    return DecoderLayer(
        attention_norm=source.dense(f"{prefix}.input_layernorm"),
        mlp_norm=source.dense(f"{prefix}.post_attention_layernorm"),
        qkv=packer.pack([f"{prefix}.self_attn.{p}_proj" for p in "qkv"]),
        output=packer.pack([f"{prefix}.self_attn.o_proj"], _PADDED_ROWS),
        gate_up=gate.interleaved(up),
        down=packer.pack([f"{prefix}.mlp.down_proj"], _PADDED_ROWS),
    )


class _Packer:
    """Weights of one format, stacked along their output rows."""

    def __init__(self, source: WeightSource, quantization: str) -> None:
        self._source = source
        self._quantization = quantization

    def pack(self, names: Sequence[str], row_multiple: int = PANEL_ROWS) -> Panels:
        if self._quantization == "bf16":
            return pack_bf16(torch.cat([self._source.dense(n) for n in names]), row_multiple)
        if self._quantization == "int8":
            values, scales = zip(*(self._int8(n) for n in names), strict=True)
            return pack_int8(torch.cat(values), torch.cat(scales), row_multiple)
        quants, scales, minima = zip(*(self._int4(n) for n in names), strict=True)
        return pack_int4(torch.cat(quants), torch.cat(scales), torch.cat(minima), row_multiple)

    def _int8(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = self._source.blocks(name)
        if isinstance(blocks, Blocks8):
            return torch.from_numpy(blocks.values.copy()), torch.from_numpy(blocks.scales.copy())
        return round_to_int8(self._source.dense(name))

    def _int4(self, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        blocks = self._source.blocks(name)
        if isinstance(blocks, Blocks4):
            parts = (blocks.quants, blocks.scales, blocks.minima)
            quants, scales, minima = (torch.from_numpy(part.copy()) for part in parts)
            return quants, scales, minima
        return round_to_int4(self._source.dense(name))
