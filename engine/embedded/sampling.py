"""From logits to token ids. A draw depends on the request's seed and the token's position only.

The core calls ``sample`` once a step. Each draw takes one number of the counter-based generator Philox (Salmon et
al., 2011, "Parallel random numbers: as easy as 1, 2, 3"), keyed by the seed, at the position as its counter. So a
draw never depends on who else is in the batch, on preemption or on speculation. In fp32 neither do the logits, up to
ties; the faster types are multiplied in another order when rows are many, and then a text may differ by rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# A nucleus is nearly always this small; only when it is not is the whole vocabulary sorted.
_NUCLEUS_GUESS = 256


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What a request wants of its output. ``temperature`` 0 is greedy.

    ``num_logprobs`` and ``num_prompt_logprobs`` count the top entries a position; ``None`` wants none.
    """

    max_output_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    stops: tuple[str, ...] = ()
    min_output_tokens: int = 0
    ignore_eos: bool = False
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None

    @property
    def takes_most_likely(self) -> bool:
        """Whether each token is the likeliest one, and nothing else is asked about the others."""
        scores = self.num_logprobs is not None or self.num_prompt_logprobs is not None
        return self.temperature == 0 and self.min_output_tokens == 0 and not scores


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to draw: the request's parameters, the token's position in its sequence, its place in the output."""

    params: SamplingParams
    position: int
    output_index: int


def sample(logits: Tensor, draws: Sequence[Draw], eos_ids: frozenset[int]) -> list[int]:
    """Draws one token a row. ``logits`` is [num_rows, vocab] float32 and is left unchanged."""
    if not draws:
        return []
    early = [row for row, d in enumerate(draws) if d.output_index < d.params.min_output_tokens]
    if early and eos_ids:
        logits = logits.clone()
        logits[torch.tensor(early)[:, None], torch.tensor(sorted(eos_ids))] = float("-inf")
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    for row, draw in enumerate(draws):
        if draw.params.temperature > 0:
            tokens[row] = _draw(logits[row], draw)
    return tokens


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that belongs to one position of one request."""
    return float(np.random.Generator(np.random.Philox(key=seed % 2**64, counter=position)).random())


def _draw(logits: Tensor, draw: Draw) -> int:
    """Inverts the cumulative distribution; float64 keeps its rounding far below the spacing of draws."""
    # Centred before it is divided: a tiny temperature must not make two infinities to subtract.
    weights = torch.exp((logits.double() - logits.max()) / draw.params.temperature)
    if draw.params.top_p < 1.0:
        weights = _nucleus(weights, draw.params.top_p)
    cumulative = torch.cumsum(weights, dim=0)
    target = uniform(draw.params.seed, draw.position) * cumulative[-1]
    token = int(torch.searchsorted(cumulative, target, right=True))
    if token == len(weights):  # rounding can put the target on the very end of the line
        return int(weights.nonzero()[-1])
    return token


def _nucleus(weights: Tensor, top_p: float) -> Tensor:
    """Zeroes all but the smallest set of most likely tokens that holds ``top_p`` of the mass (arXiv:1904.09751)."""
    wanted = top_p * weights.sum()
    for size in (min(_NUCLEUS_GUESS, len(weights)), len(weights)):
        top, indices = torch.topk(weights, size)
        before = torch.cumsum(top, dim=0) - top
        if size == len(weights) or before[-1] + top[-1] >= wanted:
            break
    kept = indices[before < wanted] if top_p > 0 else indices[:1]
    nucleus = torch.zeros_like(weights)
    nucleus[kept] = weights[kept]
    return nucleus
