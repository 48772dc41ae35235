"""OpenAI's request bodies as the engine takes them: checked, with everything it does not do refused by name.

The server calls ``parse_completion`` and ``parse_chat`` with the decoded JSON. The fields and their ranges are those
of OpenAI's API reference; ``ignore_eos``, ``min_tokens``, ``prompt_logprobs``, ``priority`` and ``cache_salt`` are
vLLM's extensions, ``deadline_ms`` is ours.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trimtab.engine.embedded.generation import Queueing
from trimtab.engine.embedded.sampling import SamplingParams
from trimtab.errors import RequestError

MAX_LOGPROBS = 20
MAX_PROMPTS = 256
MAX_STOPS = 16

# Fields that say nothing about the output: accepted and ignored, as OpenAI does.
_IGNORED = frozenset({
    "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "reasoning_effort",
    "safety_identifier", "service_tier", "store", "user", "verbosity",
})  # fmt: skip

# Fields of features that this engine does not have: accepted only at the values that ask for nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "suffix": ("",),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "use_beam_search": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "stop_token_ids": ([],),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
}


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False


class _Body(BaseModel):
    """What both endpoints take. ``None`` means the default everywhere."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    top_p: float | None = Field(default=None, ge=0.0, le=1.0)
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(default=None, ge=0)
    max_tokens: int | None = Field(default=None, ge=0)
    priority: int | None = Field(default=None, ge=-1000, le=1000)
    deadline_ms: int | None = Field(default=None, ge=1)
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)


class _CompletionBody(_Body):
    prompt: Any
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)


class _ChatBody(_Body):
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=0)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)


class _PrefillBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    prompt: Any = None
    messages: list[dict[str, Any]] | None = Field(default=None, min_length=1)
    priority: int | None = Field(default=None, ge=-1000, le=1000)
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)


_BodyT = TypeVar("_BodyT", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Options:
    """What a request wants besides its prompts. ``max_output_tokens`` ``None``: as many as fit."""

    model: str
    max_output_tokens: int | None
    temperature: float
    top_p: float
    seed: int
    stops: tuple[str, ...]
    min_output_tokens: int
    ignore_eos: bool
    num_logprobs: int | None
    num_prompt_logprobs: int | None
    stream: bool
    include_usage: bool
    continuous_usage: bool  # vLLM's extension: every chunk tells the usage so far
    echo: bool
    queueing: Queueing

    def sampling(self, num_fitting_tokens: int) -> SamplingParams:
        """The sampling of one prompt beside which ``num_fitting_tokens`` output tokens fit."""
        wanted = self.max_output_tokens
        return SamplingParams(
            max_output_tokens=num_fitting_tokens if wanted is None else wanted,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stops=self.stops,
            min_output_tokens=self.min_output_tokens,
            ignore_eos=self.ignore_eos,
            num_logprobs=self.num_logprobs,
            num_prompt_logprobs=self.num_prompt_logprobs,
        )


@dataclass(frozen=True, slots=True)
class CompletionQuery:
    """A checked body of ``/v1/completions``; each prompt is text or token ids."""

    options: Options
    prompts: tuple[str | tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class ChatQuery:
    """A checked body of ``/v1/chat/completions``; every message's content is text."""

    options: Options
    messages: tuple[dict[str, Any], ...]


def parse_completion(body: Any) -> CompletionQuery:
    """Raises ``RequestError`` that names the field, what was found and what is accepted."""
    parsed = _validated(_CompletionBody, body)
    num_logprobs = parsed.logprobs
    scores_prompt = parsed.prompt_logprobs if not parsed.echo or num_logprobs is None else num_logprobs
    options = _options(
        parsed,
        max_output_tokens=16 if parsed.max_tokens is None else parsed.max_tokens,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=scores_prompt,
        echo=bool(parsed.echo),
    )
    return CompletionQuery(options, _prompts(parsed.prompt))


def parse_chat(body: Any) -> ChatQuery:
    """Raises ``RequestError`` that names the field, what was found and what is accepted."""
    parsed = _validated(_ChatBody, body)
    if parsed.top_logprobs is not None and not parsed.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    wanted = parsed.max_tokens if parsed.max_completion_tokens is None else parsed.max_completion_tokens
    options = _options(
        parsed,
        max_output_tokens=wanted,
        num_logprobs=(parsed.top_logprobs or 0) if parsed.logprobs else None,
        num_prompt_logprobs=None,
        echo=False,
    )
    return ChatQuery(options, tuple(_text_message(i, m) for i, m in enumerate(parsed.messages)))


def parse_prefill(body: Any) -> CompletionQuery | ChatQuery:
    """A body of ``/v1/prefill``: a prompt, or messages as for a chat. Raises ``RequestError`` as the others do."""
    parsed = _validated(_PrefillBody, body)
    if (parsed.prompt is None) == (parsed.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    unwanted = _Body(model=parsed.model, priority=parsed.priority, cache_salt=parsed.cache_salt)
    options = _options(unwanted, max_output_tokens=0, num_logprobs=None, num_prompt_logprobs=None, echo=False)
    if parsed.messages is not None:
        return ChatQuery(options, tuple(_text_message(i, m) for i, m in enumerate(parsed.messages)))
    return CompletionQuery(options, _prompts(parsed.prompt))


def _options(
    body: _Body,
    *,
    max_output_tokens: int | None,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None,
    echo: bool,
) -> Options:
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop: {len(stops)} strings; accepted: at most {MAX_STOPS}", param="stop")
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")
    stream_options = body.stream_options or _StreamOptions()
    return Options(
        model=body.model,
        max_output_tokens=max_output_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        stops=tuple(s for s in stops if s),
        min_output_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        stream=bool(body.stream),
        include_usage=stream_options.include_usage,
        continuous_usage=stream_options.include_usage and stream_options.continuous_usage_stats,
        echo=echo,
        queueing=Queueing(body.priority or 0, body.deadline_ms, body.cache_salt or ""),
    )


def _validated(kind: type[_BodyT], body: Any) -> _BodyT:
    if not isinstance(body, dict):
        raise RequestError(f"the body is a JSON {type(body).__name__}; accepted: an object")
    known = {k: v for k, v in body.items() if k not in _IGNORED and not _asks_for_nothing(k, v)}
    for name in known:
        if name in kind.model_fields:
            continue
        if name in _NEUTRAL:
            accepted = " or ".join(repr(v) for v in _NEUTRAL[name])
            raise RequestError(f"{name} is not supported; accepted: {accepted}", param=name, code="unsupported")
        fields = ", ".join(sorted(kind.model_fields))
        raise RequestError(f"unknown parameter {name[:100]!r}; accepted: {fields}", param=name[:100])
    try:
        return kind.model_validate(known)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        found = "" if first["type"] == "missing" else f" (found {str(first['input'])[:80]!r})"
        raise RequestError(f"{path}: {first['msg']}{found}", param=str(first["loc"][0])) from error


def _asks_for_nothing(name: str, value: Any) -> bool:
    return name in _NEUTRAL and (value is None or value in _NEUTRAL[name])


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """A string, a list of strings, a list of token ids, or a list of those."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if len(value) <= MAX_PROMPTS and all(isinstance(v, str) for v in value):
            return tuple(value)
        if _is_ids(value):
            return (tuple(value),)
        if len(value) <= MAX_PROMPTS and all(_is_ids(v) for v in value):
            return tuple(tuple(v) for v in value)
    raise RequestError(
        "prompt is neither of what is accepted: a string, a list of token ids, "
        f"or a list of up to {MAX_PROMPTS} of either",
        param="prompt",
    )


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(v) is int for v in value)


def _text_message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """The message with its content as one string; parts that are not text are refused."""
    param = f"messages[{index}]"
    if not isinstance(message.get("role"), str):
        raise RequestError(f"{param}.role is missing; accepted: system, user, assistant", param=param)
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise RequestError(f"{param}.content: part {kind!r} is not supported; accepted: text", param=param)
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise RequestError(f"{param}.content is missing; accepted: a string or a list of text parts", param=param)
    return {"role": message["role"], "content": content}
