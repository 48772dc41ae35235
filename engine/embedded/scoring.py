"""Log-probabilities: of the tokens at hand and of the most likely ones, kept as arrays until they are written out.

The core scores output rows and prompt rows with it; ``openai_responses`` reads the arrays. A Python object for each
of 21 entries at each of 8,192 positions would cost more than the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Rows that are normalized at once: the temporaries stay at 12 MB for a vocabulary of 49,152.
_CHUNK_ROWS = 64


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Scores at a run of positions; ranks start at 1. All log-probabilities are natural, of the unscaled logits."""

    token_ids: npt.NDArray[np.int64]  # [num_positions]
    logprobs: npt.NDArray[np.float32]  # [num_positions]
    ranks: npt.NDArray[np.int64]  # [num_positions]
    top_ids: npt.NDArray[np.int64]  # [num_positions, num_top]
    top_logprobs: npt.NDArray[np.float32]  # [num_positions, num_top]

    def __len__(self) -> int:
        return len(self.token_ids)

    def first(self, num_positions: int) -> TokenScores:
        return TokenScores(*(a[:num_positions] for a in self._arrays()))

    @staticmethod
    def joined(parts: Sequence[TokenScores]) -> TokenScores:
        """The scores of consecutive runs as one. All parts have the same ``num_top``."""
        columns = zip(*(p._arrays() for p in parts), strict=True)
        return TokenScores(*(np.concatenate(c) for c in columns))

    def _arrays(self) -> tuple[npt.NDArray[Any], ...]:
        return (self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs)


def score(logits: Tensor, token_ids: Sequence[int], num_top: int) -> TokenScores:
    """Scores ``token_ids`` ([num_rows]) against ``logits`` ([num_rows, vocab] float32, unchanged)."""
    ids = torch.tensor(list(token_ids), dtype=torch.int64)
    num_rows = len(ids)
    logprobs = torch.empty(num_rows)
    ranks = torch.empty(num_rows, dtype=torch.int64)
    top_ids = torch.empty(num_rows, num_top, dtype=torch.int64)
    top_logprobs = torch.empty(num_rows, num_top)
    for start in range(0, num_rows, _CHUNK_ROWS):
        rows = slice(start, min(start + _CHUNK_ROWS, num_rows))
        chunk = logits[rows]
        normalizer = torch.logsumexp(chunk, dim=-1)
        chosen = chunk.gather(1, ids[rows, None])[:, 0]
        logprobs[rows] = chosen - normalizer
        ranks[rows] = (chunk > chosen[:, None]).sum(dim=-1) + 1
        top, indices = torch.topk(chunk, num_top, dim=-1)
        top_ids[rows] = indices
        top_logprobs[rows] = top - normalizer[:, None]
    return TokenScores(ids.numpy(), logprobs.numpy(), ranks.numpy(), top_ids.numpy(), top_logprobs.numpy())
