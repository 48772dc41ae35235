"""A model's weights on their way from a file to the model: one interface over both kinds of file.

``loader_gguf`` and ``loader_safetensors`` implement it, ``quantization`` reads it, a tensor at a time, so that a
file is never in memory twice.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from trimtab.engine.embedded.config import ModelConfig
from trimtab.engine.embedded.gguf_blocks import Blocks4, Blocks8

# The names of Hugging Face's Llama, which both loaders answer to.
EMBEDDING = "model.embed_tokens"
FINAL_NORM = "model.norm"
HEAD = "lm_head"


class WeightSource(Protocol):
    """Weights by Hugging Face's names, without ``.weight``."""

    @property
    def config(self) -> ModelConfig: ...

    def dense(self, name: str) -> Tensor:
        """A weight in float32 (checked shape). Raises ``ModelFileError``."""
        ...

    def blocks(self, name: str) -> Blocks4 | Blocks8 | None:
        """A weight's own quantized blocks where the file has them; ``None``: it is stored otherwise."""
        ...


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every weight of a model of this shape."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden), FINAL_NORM: (hidden,)}
    if not config.tied_head:
        shapes[HEAD] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm": (hidden,),
            f"{prefix}.post_attention_layernorm": (hidden,),
            f"{prefix}.self_attn.q_proj": (config.q_size, hidden),
            f"{prefix}.self_attn.k_proj": (config.kv_size, hidden),
            f"{prefix}.self_attn.v_proj": (config.kv_size, hidden),
            f"{prefix}.self_attn.o_proj": (hidden, config.q_size),
            f"{prefix}.mlp.gate_proj": (config.intermediate_size, hidden),
            f"{prefix}.mlp.up_proj": (config.intermediate_size, hidden),
            f"{prefix}.mlp.down_proj": (hidden, config.intermediate_size),
        }
    return shapes
