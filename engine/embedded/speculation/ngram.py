"""N-gram speculation: drafts are what followed the last tokens when they occurred before.

Prompt lookup decoding (Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding), over prompt and output. A draft
is accepted exactly when it equals the token that the sampler draws at its position, so the text is what it would be
without speculation, greedy or sampled. The core owns one index a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

# The longest match is tried first. One token repeats by chance too often to be worth the rows.
MATCH_LENGTHS = (4, 3, 2)


class NgramIndex:
    """Where each n-gram of one growing sequence was last continued. Constant time a token."""

    def __init__(self) -> None:
        self._continuations: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def propose(self, token_ids: Sequence[int], num_wanted: int) -> list[int]:
        """Up to ``num_wanted`` tokens that followed the latest earlier occurrence of the last tokens.

        ``token_ids`` is the sequence so far; it must extend what the last call was given.
        """
        self._extend(token_ids)
        for length in MATCH_LENGTHS:
            if len(token_ids) <= length:
                continue
            start = self._continuations.get(tuple(token_ids[-length:]))
            if start is not None:
                return list(token_ids[start : start + num_wanted])
        return []

    def _extend(self, token_ids: Sequence[int]) -> None:
        # An n-gram that ends the sequence has no continuation yet.
        for end in range(max(self._num_indexed, 1), len(token_ids)):
            for length in MATCH_LENGTHS:
                if length <= end:
                    self._continuations[tuple(token_ids[end - length : end])] = end
        self._num_indexed = len(token_ids)


def num_accepted(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """How many leading drafts equal the tokens sampled at their positions."""
    count = 0
    while count < len(drafts) and drafts[count] == sampled[count]:
        count += 1
    return count
