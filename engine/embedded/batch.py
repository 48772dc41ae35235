"""One step's input to the model: a flat batch of tokens, and where each sequence lies in it. Data only.

The runner builds it from the scheduler's plan; the model reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from trimtab.kernels.attention import Span


@dataclass(frozen=True, slots=True)
class StepBatch:
    """All tokens of one step."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    slots: Tensor  # [num_tokens] int64: block * block_size + offset, where each token's K and V go
    spans: tuple[Span, ...]  # where each sequence lies in it
    logit_rows: Tensor  # [num_logit_rows] int64: rows whose logits are wanted
