"""Text to tokens and back with a model's own tokenizer, and chat messages to a prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from trimtab.engine.embedded.chat_template import ChatTemplate
from trimtab.errors import ModelFileError, RequestError


class Tokenizer:
    """A model's own tokenizer."""

    def __init__(
        self,
        fast: FastTokenizer,
        *,
        eos_ids: frozenset[int],
        bos_id: int | None,
        add_bos: bool,
        chat_template: ChatTemplate | None,
    ) -> None:
        self._fast = fast
        self._plain = FastTokenizer.from_str(fast.to_str())
        self._plain.encode_special_tokens = True
        self._add_bos = add_bos
        self._template = chat_template
        self.vocab_size: int = fast.get_vocab_size()
        self.eos_ids = eos_ids
        self.bos_id = bos_id
        self._byte_of = {character: byte for byte, character in _byte_characters().items()}
        self._special = {token.content for token in fast.get_added_tokens_decoder().values() if token.special}

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        """Token ids of ``text``; control tokens written out in it count as such only with ``parse_special``."""
        fast = self._fast if parse_special else self._plain
        ids: list[int] = fast.encode(text, add_special_tokens=False).ids
        # A chat template may have written it already.
        return [self.bos_id, *ids] if self._add_bos and self.bos_id is not None and ids[:1] != [self.bos_id] else ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``; control tokens are left out."""
        return b"".join(self.token_bytes(i) for i in ids).decode("utf-8", errors="replace")

    def token_text(self, token_id: int) -> str:
        """One token for people; a part of a character shows as the replacement character."""
        token = self._fast.id_to_token(token_id)
        if token in self._special:
            return str(token)
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; none for a control token or an id without one."""
        token = self._fast.id_to_token(token_id)
        if token is None or token in self._special:
            return b""
        return b"".join(bytes([self._byte_of[c]]) if c in self._byte_of else c.encode() for c in token)

    def render_chat(self, messages: list[dict[str, Any]]) -> str:
        """The prompt of a conversation, ending where the assistant speaks.

        Raises:
            RequestError: the model has no chat template, or the template refuses the messages.
        """
        if self._template is None:
            raise RequestError("this model has no chat template; use /v1/completions", param="messages")
        return self._template.render(messages)


class IncrementalDetokenizer:
    """One sequence's output text, token by token; never emits a part of a UTF-8 character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pending = b""

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes; empty while a character is open."""
        self._pending += self._tokenizer.token_bytes(token_id)
        cut = len(self._pending) - _open_bytes(self._pending)
        ready, self._pending = self._pending[:cut], self._pending[cut:]
        return ready.decode("utf-8", errors="replace")

    def flush(self) -> str:
        """What is left at the end; an unfinished character becomes the replacement character."""
        rest, self._pending = self._pending, b""
        return rest.decode("utf-8", errors="replace")


def bpe_tokenizer(
    tokens: list[str],
    merges: list[Any],
    control: Sequence[str],
    *,
    split_digits: bool,
    eos_ids: frozenset[int],
    bos_id: int | None,
    add_bos: bool,
    chat_template: str | None,
) -> Tokenizer:
    """A byte-level BPE tokenizer from its parts, as GGUF files carry them.

    Raises:
        ValueError: a merge makes no token, or the tokens are not unique.
    """
    if len(set(tokens)) != len(tokens):
        raise ValueError("its tokens are not unique")
    try:
        fast = FastTokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    except Exception as error:  # tokenizers raises bare Exception for bad merges
        raise ValueError(str(error)) from error
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    fast.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level]) if split_digits else byte_level
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    names = {"bos_token": _name(tokens, bos_id), "eos_token": _name(tokens, min(eos_ids, default=None))}
    template = ChatTemplate(chat_template, names) if chat_template else None
    return Tokenizer(fast, eos_ids=eos_ids, bos_id=bos_id, add_bos=add_bos, chat_template=template)


def load_tokenizer_json(
    path: Path, *, eos_ids: frozenset[int], bos_id: int | None, chat_template: str | None
) -> Tokenizer:
    """A ``tokenizer.json``. Raises ``ModelFileError``."""
    try:
        fast = FastTokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception for any bad file
        raise ModelFileError(f"{path}: not a tokenizer: {error}") from error
    # What a token stands for is read from byte-level BPE's characters; another alphabet would come out as wrong text.
    decoder = json.loads(fast.to_str())["decoder"] or {"type": None}
    if all(step["type"] != "ByteLevel" for step in decoder.get("decoders", [decoder])):
        raise ModelFileError(f"{path}: its decoder is {decoder['type']}; accepted: ByteLevel")
    names = {
        "bos_token": (fast.id_to_token(bos_id) if bos_id is not None else None) or "",
        "eos_token": (fast.id_to_token(min(eos_ids)) if eos_ids else None) or "",
    }
    template = ChatTemplate(chat_template, names) if chat_template else None
    # Whether the file's own post-processor puts it there.
    add_bos = bos_id is not None and fast.encode("").ids[:1] == [bos_id]
    return Tokenizer(fast, eos_ids=eos_ids, bos_id=bos_id, add_bos=add_bos, chat_template=template)


def _name(tokens: list[str], token_id: int | None) -> str:
    if token_id is None:
        return ""
    if not 0 <= token_id < len(tokens):
        raise ValueError(f"token id {token_id} is outside the vocabulary of {len(tokens)}")
    return tokens[token_id]


def _byte_characters() -> dict[int, str]:
    """Byte-level BPE's printable stand-in for each byte (Radford et al. 2019, GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in set(printable))
    return {**{b: chr(b) for b in printable}, **{b: chr(256 + i) for i, b in enumerate(others)}}


def _open_bytes(data: bytes) -> int:
    """How many bytes at the end begin a UTF-8 character that is not complete."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte < 0x80:
            return 0
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if back < needed else 0
    return 0
