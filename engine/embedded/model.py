"""A Llama-architecture model over a paged KV cache. Signature first; the body follows."""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.engine.embedded.batch import StepBatch
from trimtab.engine.embedded.config import ModelConfig
from trimtab.engine.embedded.kv_pool import KVPool


class LlamaModel:
    """The model; ``kv_dtype`` is what its KV pool must hold."""

    config: ModelConfig
    kv_dtype: torch.dtype

    def forward(self, batch: StepBatch, kv: KVPool) -> Tensor:
        """Runs one step and returns ``[num_logit_rows, vocab_size]`` float32 logits; writes K and V into ``kv``."""
        raise NotImplementedError
