"""Text to tokens and back, and chat rendering. Signatures first; the bodies follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Tokenizer:
    """A model's own tokenizer."""

    vocab_size: int
    eos_ids: frozenset[int]
    bos_id: int | None

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        """Token ids of ``text``; control tokens written out in it count as such only with ``parse_special``."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        raise NotImplementedError

    def token_text(self, token_id: int) -> str:
        raise NotImplementedError

    def token_bytes(self, token_id: int) -> bytes:
        raise NotImplementedError

    def render_chat(self, messages: list[dict[str, Any]]) -> str:
        raise NotImplementedError


class IncrementalDetokenizer:
    """One sequence's output text, token by token; never emits a part of a UTF-8 character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        raise NotImplementedError

    def push(self, token_id: int) -> str:
        raise NotImplementedError

    def flush(self) -> str:
        raise NotImplementedError
