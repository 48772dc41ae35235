"""The prefix cache: TTFT when 0, 50 and 90 % of each prompt are shared, and after ``/v1/prefill`` warmed a prompt."""

from __future__ import annotations

import random
from statistics import median
from typing import Any

from benchmarks.core import drain, new_core, random_prompt
from benchmarks.report import Row
from benchmarks.techniques.serving import QUANTIZATION, send
from trimtab.engine.embedded.core import EngineCore
from trimtab.engine.embedded.loader import LoadedModel

SHARED_RATIOS = (0.0, 0.5, 0.9)
PROMPT_TOKENS = 512


def measure(loaded: LoadedModel, seed: int, *, quick: bool) -> dict[str, float]:
    """TTFT in seconds of a prompt alone on the engine, with the cache on and off."""
    cores = {state: new_core(loaded, QUANTIZATION, prefix_cache=state) for state in ("on", "off")}
    rng = random.Random(seed)
    found: dict[str, float] = {}
    for ratio in SHARED_RATIOS:
        num_shared = round(PROMPT_TOKENS * ratio)
        shared = random_prompt(rng, num_shared)
        prompts = [shared + random_prompt(rng, PROMPT_TOKENS - num_shared) for _ in range(2 if quick else 4)]
        for state, core in cores.items():
            _first, *others = [_ttft_s(core, p) for p in prompts]
            found[f"{state}, {ratio}"] = median(others)
    typed = random_prompt(rng, PROMPT_TOKENS)
    for state, core in cores.items():
        send(core, typed[:-16], 0)  # what /v1/prefill does while a user is still typing
        drain(core)
        found[f"{state}, warmed"] = _ttft_s(core, typed)
    return found


def rows(rounds: list[Any]) -> list[Row]:
    cases = {str(r): f"prefix cache, {r:.0%} of {PROMPT_TOKENS} tokens shared, TTFT" for r in SHARED_RATIOS}
    cases["warmed"] = f"/v1/prefill of all but 16 of {PROMPT_TOKENS} tokens, TTFT after it"
    made = []
    for key, case in cases.items():
        values = [1000 * r[f"on, {key}"] for r in rounds]
        ratio = median(r[f"on, {key}"] / r[f"off, {key}"] for r in rounds)
        made.append(Row.of(case, values, "ms", against="prefix cache off", ratio=ratio))
    return made


def _ttft_s(core: EngineCore, prompt: tuple[int, ...]) -> float:
    served = send(core, prompt, 1)
    drain(core)
    return served.ttft_s
