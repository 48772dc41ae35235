"""What the engine asks of a model. ``native_model`` and ``torch_model`` are the two that there are."""

from __future__ import annotations

from typing import Protocol

import torch

from trimtab.engine.embedded.batch import StepBatch, StepOutput
from trimtab.engine.embedded.config import ModelConfig
from trimtab.engine.embedded.kv.pool import KVPool


class Model(Protocol):
    """Runs one step at a time; not thread-safe."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def kernels(self) -> str:
        """What computes it: ``torch``, or the level of the native kernels."""
        ...

    @property
    def kv_dtype(self) -> torch.dtype:
        """What its KV pool holds uncompressed."""
        ...

    def forward(self, batch: StepBatch, kv: KVPool) -> StepOutput:
        """Runs one step; its keys and values enter ``kv``."""
        ...
