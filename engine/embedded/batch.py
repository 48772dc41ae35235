"""One step's input to the model: a flat batch of tokens, and where each sequence lies in it. Data only.

The runner builds it from the scheduler's plan; the model reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """One sequence's rows in the batch and its block table."""

    query_start: int  # first row of this sequence in the batch
    query_len: int  # rows: 1 in plain decode, up to 8 when drafts are verified, a chunk in prefill
    context_len: int  # tokens in the cache after this step, the query included
    block_ids: tuple[int, ...]  # its block table, covering context_len


@dataclass(frozen=True, slots=True)
class StepBatch:
    """All tokens of one step."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    slots: Tensor  # [num_tokens] int64: block_id * block_size + offset, where each token's K and V go
    sequences: tuple[SequenceSlice, ...]
    logit_rows: Tensor  # [num_logit_rows] int64: rows whose logits are wanted
