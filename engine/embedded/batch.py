"""One step's input to the model and what comes out of it. Data only.

The runner builds the batch from the scheduler's plan; a model turns it into an output.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from trimtab.kernels.attention import Span

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """All tokens of one step, as int32."""

    token_ids: Ints  # [num_tokens]
    positions: Ints  # [num_tokens]
    slots: Ints  # [num_tokens]: block * block_size + offset, where each token's K and V go
    spans: tuple[Span, ...]  # where each sequence lies in it
    logit_rows: Ints  # [num_logit_rows]: rows whose most likely next token is wanted
    wants_logits: bool  # whether their logits are wanted too


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What the wanted rows predict. ``logits`` is ``[num_logit_rows, vocab_size]`` float32; ``None``: not wanted."""

    most_likely: list[int]
    logits: Tensor | None
