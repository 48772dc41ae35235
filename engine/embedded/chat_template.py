"""Renders a model's chat template: Jinja's immutable sandbox, with a limit on output and on time.

A template comes from a model file and is not trusted. The sandbox keeps it from Python; the limits keep it from
looping: output is cut off by size, and time is checked at every piece, call and message.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trimtab.errors import ModelFileError, RequestError

MAX_OUTPUT_CHARACTERS = 16 * 1024 * 1024
MAX_SECONDS = 2.0


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with bounded ranges (Jinja's own limit) and calls that watch the clock."""

    deadline_s = 0.0

    def call(self, *arguments: Any, **named: Any) -> Any:
        self.check_time()
        return super().call(*arguments, **named)

    def check_time(self) -> None:
        if time.monotonic() > self.deadline_s:
            raise jinja2.TemplateRuntimeError("it takes too long")


class _Watched(list[Any]):
    """The messages; iterating over them watches the clock."""

    def __init__(self, items: Iterable[Any], environment: _Environment) -> None:
        super().__init__(items)
        self._environment = environment

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            self._environment.check_time()
            yield item


class ChatTemplate:
    """One model's template. ``names`` are its special tokens by Hugging Face's variable names."""

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        """Raises ``ModelFileError`` when the source is not a template."""
        self._environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        self._environment.globals["raise_exception"] = _raise
        self._names = dict(names)
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelFileError(f"the chat template is not valid: {error}") from error

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The prompt. Raises ``RequestError`` with the template's words when it refuses the messages."""
        self._environment.deadline_s = time.monotonic() + MAX_SECONDS
        pieces, size = [], 0
        try:
            watched = _Watched(messages, self._environment)
            for piece in self._template.generate(messages=watched, add_generation_prompt=True, **self._names):
                self._environment.check_time()
                size += len(piece)
                if size > MAX_OUTPUT_CHARACTERS:
                    raise jinja2.TemplateRuntimeError("its output is too long")
                pieces.append(piece)
        except (jinja2.TemplateError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from error
        return "".join(pieces)


def _raise(message: str) -> NoReturn:
    """``raise_exception`` as templates call it."""
    raise jinja2.TemplateError(message)
