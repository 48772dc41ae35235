"""Renders a model's chat template: Jinja's immutable sandbox, with a limit on output and on time.

A template comes from a model file and is not trusted. The sandbox keeps it from Python; the limits keep it from
looping: output is cut off by size, time is checked at every piece, call and turn of a loop, and products are bounded
before they are computed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trimtab.errors import ModelFileError, RequestError

MAX_OUTPUT_CHARACTERS = 16 * 1024 * 1024
MAX_SECONDS = 2.0
MAX_POWER_BITS = 4096

_WATCHED = "watched by the clock"  # a filter's name that no template can spell


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with bounded ranges (Jinja's own limit) and products, and calls and loops that watch the clock."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        self._clock = threading.local()  # chats are rendered in several threads

    def start_clock(self) -> None:
        self._clock.deadline_s = time.monotonic() + MAX_SECONDS

    def call(self, *arguments: Any, **named: Any) -> Any:
        self.check_time()
        return super().call(*arguments, **named)

    def check_time(self) -> None:
        if time.monotonic() > self._clock.deadline_s:
            raise jinja2.TemplateRuntimeError("it takes too long")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if _product_size(operator, left, right) > MAX_OUTPUT_CHARACTERS:
            raise jinja2.TemplateRuntimeError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)

    def watched(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.check_time()
            yield item

    def watch_loops(self, template: nodes.Template) -> nodes.Template:
        """Makes every loop of a parsed template take its items through ``watched``."""
        self.filters[_WATCHED] = self.watched
        for loop in template.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _WATCHED, [], [], None, None, lineno=loop.lineno)
        return template


def _product_size(operator: str, left: Any, right: Any) -> float:
    """How many items, or for powers how many times the allowed bits, the result would have; 0: a plain number."""
    if operator == "**":
        if isinstance(left, int) and isinstance(right, int):
            return MAX_OUTPUT_CHARACTERS * left.bit_length() * right / MAX_POWER_BITS
        return 0
    if isinstance(left, int) and isinstance(right, Sized):
        left, right = right, left
    return len(left) * right if isinstance(left, Sized) and isinstance(right, int) else 0


class ChatTemplate:
    """One model's template. ``names`` are its special tokens by Hugging Face's variable names."""

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        """Raises ``ModelFileError`` when the source is not a template."""
        self._environment = _Environment()
        self._environment.globals["raise_exception"] = _raise
        self._names = dict(names)
        try:
            parsed = self._environment.parse(source)
            self._template = self._environment.from_string(self._environment.watch_loops(parsed))
        except jinja2.TemplateError as error:
            raise ModelFileError(f"the chat template is not valid: {error}") from error

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The prompt. Raises ``RequestError`` with the template's words when it refuses the messages."""
        self._environment.start_clock()
        pieces, size = [], 0
        try:
            for piece in self._template.generate(messages=messages, add_generation_prompt=True, **self._names):
                self._environment.check_time()
                size += len(piece)
                if size > MAX_OUTPUT_CHARACTERS:
                    raise jinja2.TemplateRuntimeError("its output is too long")
                pieces.append(piece)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, MemoryError, RecursionError) as error:
            raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from error
        return "".join(pieces)


def _raise(message: str) -> NoReturn:
    """``raise_exception`` as templates call it."""
    raise jinja2.TemplateError(message)
