"""A Llama-architecture model on torch's CPU operations: for fp32, and where the native kernels cannot run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.engine.embedded.batch import StepBatch, StepOutput
from trimtab.engine.embedded.config import ModelConfig
from trimtab.engine.embedded.kv.pool import KVPool
from trimtab.engine.embedded.quantization import compute_dtype, projection, table
from trimtab.engine.embedded.weights import EMBEDDING, FINAL_NORM, HEAD, WeightSource
from trimtab.kernels import ops
from trimtab.kernels.attention import AttentionPlan, paged_attention, plan_attention
from trimtab.kernels.kv_cache import KVType, PagedTensor, write_tokens
from trimtab.kernels.packing import Weight, rows


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights. Q, K and V are one product, gate and up another."""

    attention_norm: Tensor
    qkv: Weight
    output: Weight
    mlp_norm: Tensor
    gate_up: Weight
    down: Weight


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's part of the KV pool, and where the step's tokens go in it."""

    keys: PagedTensor
    values: PagedTensor
    write_type: KVType
    slots: Tensor  # [num_tokens]

    def write(self, keys: Tensor, values: Tensor) -> None:
        """Both ``[num_tokens, num_kv_heads, head_dim]``."""
        write_tokens(self.keys[self.write_type], self.write_type, keys, self.slots)
        write_tokens(self.values[self.write_type], self.write_type, values, self.slots)


class TorchLlama:
    """Implements ``Model``."""

    def __init__(self, source: WeightSource, quantization: str) -> None:
        """Converts ``source`` a tensor at a time. Raises ``ModelFileError``."""
        self.config: ModelConfig = source.config
        self.kernels = "torch"
        self.kv_dtype: torch.dtype = compute_dtype(quantization)
        self._embedding = table(source, EMBEDDING, quantization)
        self._head = self._embedding if self.config.tied_head else table(source, HEAD, quantization)
        self._final_norm = self._norm(source, FINAL_NORM)
        self._layers = tuple(self._layer(source, i, quantization) for i in range(self.config.num_layers))

    def _norm(self, source: WeightSource, name: str) -> Tensor:
        return source.dense(name).to(self.kv_dtype)

    def _layer(self, source: WeightSource, index: int, quantization: str) -> Layer:
        prefix = f"model.layers.{index}"
        qkv = [f"{prefix}.self_attn.{p}_proj" for p in "qkv"]
        gate_up = [f"{prefix}.mlp.{p}_proj" for p in ("gate", "up")]
        return Layer(
            attention_norm=self._norm(source, f"{prefix}.input_layernorm"),
            qkv=projection(source, qkv, quantization),
            output=projection(source, [f"{prefix}.self_attn.o_proj"], quantization),
            mlp_norm=self._norm(source, f"{prefix}.post_attention_layernorm"),
            gate_up=projection(source, gate_up, quantization),
            down=projection(source, [f"{prefix}.mlp.down_proj"], quantization),
        )

    @torch.inference_mode()
    def forward(self, batch: StepBatch, kv: KVPool) -> StepOutput:
        """Runs one step; its keys and values enter ``kv``."""
        config = self.config
        plan = plan_attention(batch.spans, config.num_kv_heads, kv.layout.block_size)
        table_ = ops.rotary_table(torch.from_numpy(batch.positions), config.head_dim, config.rope_theta)
        hidden = rows(self._embedding, torch.from_numpy(batch.token_ids))  # [num_tokens, hidden_size]
        slots = torch.from_numpy(batch.slots).long()
        for index, layer in enumerate(self._layers):
            normed = ops.rms_norm(hidden, layer.attention_norm, config.rms_norm_eps)
            cache = LayerCache(*kv.layer(index), kv.layout.write_type, slots)
            hidden = hidden + self._attend(layer, normed, cache, table_, plan)
            normed = ops.rms_norm(hidden, layer.mlp_norm, config.rms_norm_eps)
            hidden = hidden + ops.linear(ops.swiglu(ops.linear(normed, layer.gate_up)), layer.down)
        wanted = hidden[torch.from_numpy(batch.logit_rows)]
        logits = ops.linear(ops.rms_norm(wanted, self._final_norm, config.rms_norm_eps), self._head).float()
        return StepOutput(logits.argmax(dim=-1).tolist(), logits if batch.wants_logits else None)

    def _attend(
        self,
        layer: Layer,
        normed: Tensor,
        cache: LayerCache,
        rotary: tuple[Tensor, Tensor],
        plan: AttentionPlan,
    ) -> Tensor:
        config, num_tokens = self.config, normed.shape[0]
        qkv = ops.linear(normed, layer.qkv).view(num_tokens, -1, config.head_dim)
        query, key = qkv[:, : config.num_heads], qkv[:, config.num_heads : -config.num_kv_heads]
        value = qkv[:, -config.num_kv_heads :]
        cache.write(ops.rotate(key, rotary), value)
        mixed = paged_attention(ops.rotate(query, rotary), cache.keys, cache.values, plan)
        return ops.linear(mixed.reshape(num_tokens, -1), layer.output)
