"""OpenAI's response bodies: one writer an endpoint turns emissions into chunks and whole answers.

The server calls it. Log-probabilities stay arrays until here.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from trimtab.engine.embedded.generation import Emission
from trimtab.engine.embedded.openai_protocol import Options
from trimtab.engine.embedded.scoring import TokenScores
from trimtab.engine.embedded.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as ids and, for ``echo``, as text."""

    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Header:
    """What every body of one response carries."""

    response_id: str
    model: str
    created_unix_s: int = field(default_factory=lambda: int(time.time()))


@dataclass(slots=True)
class TokenCounts:
    """What one response's emissions add up to: output tokens, and the cached tokens of each prompt."""

    num_output: int = 0
    num_cached: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, outputs: Sequence[Sequence[Emission]]) -> TokenCounts:
        """``outputs`` has every prompt's emissions."""
        counts = cls()
        for index, emissions in enumerate(outputs):
            for emission in emissions:
                counts.add(index, emission)
        return counts

    def add(self, index: int, emission: Emission) -> None:
        self.num_output += len(emission.token_ids)
        self.num_cached[index] = emission.num_cached_tokens


class Writer(Protocol):
    """How one endpoint writes what the engine emits."""

    def chunk(self, index: int, emission: Emission) -> dict[str, Any]:
        """The streamed body of one emission of the prompt at ``index``."""
        ...

    def whole(self, outputs: Sequence[Sequence[Emission]]) -> dict[str, Any]:
        """The body of a finished response; ``outputs`` has every prompt's emissions."""
        ...

    def usage_chunk(self, counts: TokenCounts) -> dict[str, Any]:
        """The last streamed body, for ``stream_options.include_usage``."""
        ...


class CompletionWriter:
    """Bodies of ``/v1/completions``. Stateful: text offsets and the echo go on from chunk to chunk."""

    def __init__(self, header: Header, tokenizer: Tokenizer, prompts: Sequence[Prompt], options: Options) -> None:
        self._header = header
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._options = options
        self._offsets = [0] * len(prompts)
        self._started = [False] * len(prompts)

    def chunk(self, index: int, emission: Emission) -> dict[str, Any]:
        return self._body([self._choice(index, [emission])])

    def whole(self, outputs: Sequence[Sequence[Emission]]) -> dict[str, Any]:
        choices = [self._choice(index, emissions) for index, emissions in enumerate(outputs)]
        return self._body(choices) | {"usage": usage(self._prompts, TokenCounts.of(outputs))}

    def usage_chunk(self, counts: TokenCounts) -> dict[str, Any]:
        return self._body([]) | {"usage": usage(self._prompts, counts)}

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        header = self._header
        return {
            "id": f"cmpl-{header.response_id}",
            "object": "text_completion",
            "created": header.created_unix_s,
            "model": header.model,
            "choices": choices,
        }

    def _choice(self, index: int, emissions: Sequence[Emission]) -> dict[str, Any]:
        first = not self._started[index]
        self._started[index] = True
        echoes = first and self._options.echo
        text = (self._prompts[index].text if echoes else "") + "".join(e.text for e in emissions)
        finish = emissions[-1].finish
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, emissions, with_prompt=echoes),
            "finish_reason": None if finish is None else finish.value,
        }
        if first and self._options.num_prompt_logprobs is not None:
            # The first token has no probability, so a prompt of one token has no scores.
            rows = [_by_token_id(e.prompt_scores, self._tokenizer) for e in emissions if e.prompt_scores is not None]
            choice["prompt_logprobs"] = [None, *itertools.chain.from_iterable(rows)]
        return choice

    def _logprobs(self, index: int, emissions: Sequence[Emission], *, with_prompt: bool) -> dict[str, Any] | None:
        if self._options.num_logprobs is None:
            return None
        tokens: list[str] = []
        token_logprobs: list[float | None] = []
        top_logprobs: list[dict[str, float] | None] = []
        parts = [e.scores for e in emissions if e.scores is not None]
        if with_prompt:
            tokens.append(self._tokenizer.token_text(self._prompts[index].token_ids[0]))
            token_logprobs.append(None)
            top_logprobs.append(None)
            parts = [e.prompt_scores for e in emissions if e.prompt_scores is not None] + parts
        for part in parts:
            tokens += map(self._tokenizer.token_text, part.token_ids.tolist())
            token_logprobs += part.logprobs.tolist()
            top_logprobs += _by_token_text(part, self._tokenizer)
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": offsets,
        }


class ChatWriter:
    """Bodies of ``/v1/chat/completions``."""

    def __init__(self, header: Header, tokenizer: Tokenizer, prompt: Prompt) -> None:
        self._header = header
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._started = False

    def chunk(self, index: int, emission: Emission) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": emission.text}
        if not self._started:
            delta = {"role": "assistant"} | delta
        self._started = True
        return self._body("chat.completion.chunk", [self._choice(index, [emission]) | {"delta": delta}])

    def whole(self, outputs: Sequence[Sequence[Emission]]) -> dict[str, Any]:
        (emissions,) = outputs
        text = "".join(e.text for e in emissions)
        message = {"role": "assistant", "content": text, "refusal": None}
        body = self._body("chat.completion", [self._choice(0, emissions) | {"message": message}])
        return body | {"usage": usage([self._prompt], TokenCounts.of(outputs))}

    def usage_chunk(self, counts: TokenCounts) -> dict[str, Any]:
        return self._body("chat.completion.chunk", []) | {"usage": usage([self._prompt], counts)}

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        header = self._header
        return {
            "id": f"chatcmpl-{header.response_id}",
            "object": kind,
            "created": header.created_unix_s,
            "model": header.model,
            "choices": choices,
        }

    def _choice(self, index: int, emissions: Sequence[Emission]) -> dict[str, Any]:
        finish = emissions[-1].finish
        parts = [e.scores for e in emissions if e.scores is not None]
        content = [entry for part in parts for entry in self._entries(part)]
        return {
            "index": index,
            "logprobs": {"content": content, "refusal": None} if parts else None,
            "finish_reason": None if finish is None else finish.value,
        }

    def _entries(self, scores: TokenScores) -> list[dict[str, Any]]:
        tops = zip(scores.top_ids.tolist(), scores.top_logprobs.tolist(), strict=True)
        return [
            self._entry(token_id, logprob)
            | {"top_logprobs": [self._entry(i, value) for i, value in zip(ids, values, strict=True)]}
            for token_id, logprob, (ids, values) in zip(
                scores.token_ids.tolist(), scores.logprobs.tolist(), tops, strict=True
            )
        ]

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        tokenizer = self._tokenizer
        return {
            "token": tokenizer.token_text(token_id),
            "logprob": logprob,
            "bytes": list(tokenizer.token_bytes(token_id)),
        }


class PrefillWriter:
    """Bodies of ``/v1/prefill``, our own endpoint: what was computed, and no text."""

    def __init__(self, header: Header, prompts: Sequence[Prompt]) -> None:
        self._header = header
        self._prompts = prompts

    def chunk(self, index: int, emission: Emission) -> dict[str, Any]:  # noqa: ARG002  a prefill emits nothing
        return self._body()

    def whole(self, outputs: Sequence[Sequence[Emission]]) -> dict[str, Any]:
        return self._body() | {"usage": usage(self._prompts, TokenCounts.of(outputs))}

    def usage_chunk(self, counts: TokenCounts) -> dict[str, Any]:
        return self._body() | {"usage": usage(self._prompts, counts)}

    def _body(self) -> dict[str, Any]:
        header = self._header
        return {
            "id": f"prefill-{header.response_id}",
            "object": "prefill",
            "created": header.created_unix_s,
            "model": header.model,
        }


def usage(prompts: Sequence[Prompt], counts: TokenCounts) -> dict[str, Any]:
    """OpenAI's ``usage`` object."""
    num_prompt_tokens = sum(len(p.token_ids) for p in prompts)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": counts.num_output,
        "total_tokens": num_prompt_tokens + counts.num_output,
        "prompt_tokens_details": {"cached_tokens": sum(counts.num_cached.values())},
    }


def _by_token_text(scores: TokenScores, tokenizer: Tokenizer) -> list[dict[str, float] | None]:
    """OpenAI's older form. Of tokens with equal text the likeliest one counts; the token at hand is always there."""
    rows: list[dict[str, float] | None] = []
    tops = zip(scores.top_ids.tolist(), scores.top_logprobs.tolist(), strict=True)
    for token_id, logprob, (ids, values) in zip(
        scores.token_ids.tolist(), scores.logprobs.tolist(), tops, strict=True
    ):
        row: dict[str, float] = {}
        for top_id, value in zip(ids, values, strict=True):
            row.setdefault(tokenizer.token_text(top_id), value)
        row.setdefault(tokenizer.token_text(token_id), logprob)
        rows.append(row)
    return rows


def _by_token_id(scores: TokenScores, tokenizer: Tokenizer) -> list[dict[str, dict[str, Any]]]:
    """vLLM's ``prompt_logprobs``: keyed by token id, the token at hand included."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": tokenizer.token_text(token_id)}

    rows = []
    chosen = zip(scores.token_ids.tolist(), scores.logprobs.tolist(), scores.ranks.tolist(), strict=True)
    tops = zip(scores.top_ids.tolist(), scores.top_logprobs.tolist(), strict=True)
    for (token_id, logprob, rank), (ids, values) in zip(chosen, tops, strict=True):
        row = {str(i): entry(i, value, at) for at, (i, value) in enumerate(zip(ids, values, strict=True), start=1)}
        row[str(token_id)] = entry(token_id, logprob, rank)
        rows.append(row)
    return rows
