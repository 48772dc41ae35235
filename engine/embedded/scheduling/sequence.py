"""One sequence as the scheduler sees it: its tokens and how many of them are in the KV cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt and output in one list. Compared by identity; owned by the engine thread. Times are monotonic.

    A sequence whose only token outside the cache is its last one decodes; with more of them it prefills (a prompt, or
    everything again after a preemption).
    """

    sequence_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    max_output_tokens: int
    arrival_s: float = 0.0
    deadline_s: float | None = None  # by when it must have been admitted, or it is refused; None: no such time
    priority: int = 0  # the lower, the sooner
    cache_salt: str = ""  # it shares cached prefixes only with sequences of the same salt
    scores_prompt: bool = False  # logits of prompt positions are wanted, so its prefill takes scored rows
    num_scored_tokens: int = 1  # prompt tokens whose log-probabilities are known; the first token has none
    num_computed_tokens: int = 0  # tokens whose keys and values are in the cache, or swapped out
    num_cached_tokens: int | None = (
        None  # prompt tokens that its first admission found cached; None: not admitted yet
    )
    num_preemptions: int = 0
    admission: int = -1  # grows by one an admission: the highest among the running was admitted last
    turn: int = -1  # grows by one whenever any sequence is scheduled: the lowest has waited longest

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that must still go through the model before the next one can be sampled."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def max_cached_tokens(self) -> int:
        """The most cache positions that it can ever need: its last output token is never fed back."""
        return max(self.num_prompt_tokens, self.num_prompt_tokens + self.max_output_tokens - 1)
