"""The real engine core without HTTP, stepped by the benchmark's own thread: making one, filling it, running it."""

from __future__ import annotations

import argparse
import os
import random
import time
from pathlib import Path

from trimtab.engine.adapters.embedded import CATALOGUE
from trimtab.engine.contract import KnobValue
from trimtab.engine.embedded.core import EngineCore, Telemetry
from trimtab.engine.embedded.generation import Emission, GenerationRequest
from trimtab.engine.embedded.loader import LoadedModel
from trimtab.engine.embedded.metrics import EngineMetrics
from trimtab.engine.embedded.records import RecordRing
from trimtab.engine.embedded.sampling import SamplingParams
from trimtab.engine.models import cached_path

_MODEL = "smollm2-135m-instruct"
_FIRST_ID, _LAST_ID = 100, 40_000  # ordinary tokens of the vocabulary


def add_model(options: argparse.ArgumentParser) -> None:
    """Adds ``--model``; without it the benchmark runs on the cached SmolLM2."""
    cached = cached_path(_MODEL, Path(os.environ.get("TRIMTAB_CACHE") or Path.home() / ".cache/trimtab"))
    text = f"a .gguf file or a Hugging Face folder (default: the cached {_MODEL}; `trimtab model fetch`)"
    options.add_argument("--model", type=Path, default=cached, required=cached is None, help=text)


def new_core(loaded: LoadedModel, quantization: str, **knobs: KnobValue) -> EngineCore:
    configuration = CATALOGUE.configuration({"quantization": quantization, **knobs})
    return EngineCore(loaded, configuration, Telemetry(EngineMetrics(), RecordRing()))


def random_prompt(rng: random.Random, num_tokens: int) -> tuple[int, ...]:
    return tuple(rng.randrange(_FIRST_ID, _LAST_ID) for _ in range(num_tokens))


def submit(core: EngineCore, prompt_ids: tuple[int, ...], output_tokens: int, received: list[Emission]) -> None:
    """Queues one greedy request of exactly ``output_tokens``; what it emits is appended to ``received``."""
    params = SamplingParams(max_output_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    now_s = time.monotonic()
    core.submit(GenerationRequest("benchmark", prompt_ids, params, now_s, now_s, received.append))


def drain(core: EngineCore) -> None:
    while core.has_work:
        core.step()


def fill(core: EngineCore, num_streams: int, prompt_tokens: int, output_tokens: int, rng: random.Random) -> None:
    """Prefills ``num_streams`` requests, so that every further step decodes one token of each."""
    received: list[list[Emission]] = [[] for _ in range(num_streams)]
    for emissions in received:
        submit(core, random_prompt(rng, prompt_tokens), output_tokens, emissions)
    while not all(received):
        core.step()
