"""Synthetic traffic: an arrival law, log-normal lengths and prompts cut from the project's public-domain text.

Arrivals and shapes come from separate random streams, and gaps are drawn with mean 1 and divided by the rate, so
request ``i`` is the same at every rate: only the clock is scaled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources

import numpy as np

from trimtab.errors import WorkloadError
from trimtab.experiments.workload.interface import PlannedRequest

# Of prompts.txt under SmolLM2's tokenizer. Lengths are therefore nominal; what counts is what the engine reports.
CHARACTERS_PER_TOKEN = 4.18

_ARRIVALS, _SHAPES = 0, 1  # names of the random streams


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The law of the gaps between arrivals. ``cv`` is their coefficient of variation, read for gamma only."""

    process: str = "poisson"
    cv: float = 1.0

    def gaps(self, generator: np.random.Generator) -> Iterator[float]:
        """Endless gaps with mean 1.

        Raises:
            WorkloadError: the process is not one of the accepted ones.
        """
        match self.process:
            case "poisson":
                while True:
                    yield float(generator.exponential())
            case "constant":
                while True:
                    yield 1.0
            case "gamma":
                shape = 1.0 / self.cv**2
                while True:
                    yield float(generator.gamma(shape, 1.0 / shape))
            case _:
                raise WorkloadError(
                    f"arrival process {self.process!r} is unknown; accepted: poisson, constant, gamma"
                )


@dataclass(frozen=True, slots=True)
class LogNormalTokens:
    """A log-normal number of tokens, at least 1, clipped to ``max_tokens``."""

    median_tokens: int
    sigma: float
    max_tokens: int

    def draw(self, generator: np.random.Generator) -> int:
        value = self.median_tokens * float(np.exp(self.sigma * generator.standard_normal()))
        return max(1, min(self.max_tokens, round(value)))

    def describe(self) -> str:
        return f"log-normal, median {self.median_tokens}, sigma {self.sigma:g}, at most {self.max_tokens}"


@dataclass(frozen=True, slots=True)
class SyntheticWorkload:
    """See the module. ``split`` 0 is the search's traffic; each other number is held-out traffic of its own."""

    rate_per_s: float
    arrivals: Arrivals
    prompt_tokens: LogNormalTokens
    output_tokens: LogNormalTokens
    seed: int
    split: int = 0

    @property
    def content_known(self) -> bool:
        return False

    def requests(self, duration_s: float) -> tuple[PlannedRequest, ...]:
        shapes = self._stream(_SHAPES)
        planned: list[PlannedRequest] = []
        at_s = 0.0
        for gap in self.arrivals.gaps(self._stream(_ARRIVALS)):
            at_s += gap / self.rate_per_s
            if at_s >= duration_s:
                break
            prompt = _cut_prompt(self.prompt_tokens.draw(shapes), shapes)
            planned.append(PlannedRequest(len(planned), at_s, prompt, self.output_tokens.draw(shapes)))
        return tuple(planned)

    def at_rate(self, rate_per_s: float) -> SyntheticWorkload:
        return dataclasses.replace(self, rate_per_s=rate_per_s)

    def held_out(self, seed: int) -> SyntheticWorkload:
        return dataclasses.replace(self, split=seed + 1)

    def describe(self) -> str:
        law = f"gamma (cv {self.arrivals.cv:g})" if self.arrivals.process == "gamma" else self.arrivals.process
        return (
            f"synthetic, {law} arrivals at {self.rate_per_s:g}/s, prompt tokens {self.prompt_tokens.describe()}, "
            f"output tokens {self.output_tokens.describe()}, seed {self.seed}"
        )

    def _stream(self, name: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, self.split, name])


@cache
def prompt_text() -> str:
    """The public-domain text that synthetic prompts are cut from, on one line."""
    text = (resources.files("trimtab.experiments.texts") / "prompts.txt").read_text(encoding="utf-8")
    return text.replace("\n", " ")


def _cut_prompt(num_tokens: int, generator: np.random.Generator) -> str:
    """About ``num_tokens`` of text from a random word on; the text goes round at its end."""
    text = prompt_text()
    num_characters = max(4, round(num_tokens * CHARACTERS_PER_TOKEN))
    start = text.find(" ", int(generator.integers(len(text)))) + 1
    rounds = 1 + (start + num_characters) // len(text)
    return (text * (rounds + 1))[start : start + num_characters]
