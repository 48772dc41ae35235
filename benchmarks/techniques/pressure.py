"""Compress, swap and recompute under the same pressure: a pool that holds half of what the requests come to need."""

from __future__ import annotations

import random
from statistics import median
from typing import Any

from benchmarks.core import drain, new_core, random_prompt
from benchmarks.report import Row, cpu_s
from benchmarks.techniques.serving import QUANTIZATION, send, turn
from trimtab.engine.embedded.loader import LoadedModel

ACTIONS = ("recompute", "swap", "compress")
NUM_REQUESTS, PROMPT_TOKENS = 24, 96
_NO_PRESSURE = "no pressure"


def measure(loaded: LoadedModel, seed: int, *, quick: bool) -> dict[str, float]:
    """Output tokens per CPU second of each action, and of a pool that is large enough."""
    arms = (*ACTIONS, _NO_PRESSURE)
    first = seed % len(arms)
    return {arm: _tokens_per_s(loaded, arm, seed, quick=quick) for arm in (*arms[first:], *arms[:first])}


def rows(rounds: list[Any]) -> list[Row]:
    made = []
    for action in ACTIONS:
        values = [r[action] for r in rounds]
        ratio = median(v / r[_NO_PRESSURE] for v, r in zip(values, rounds, strict=True))
        case = f"half the KV pool, {action}"
        made.append(Row.of(case, values, "output tokens per CPU second", against="a whole pool", ratio=ratio))
    return made


def _tokens_per_s(loaded: LoadedModel, arm: str, seed: int, *, quick: bool) -> float:
    rng = random.Random(seed)
    outputs = [rng.choice((32, 64, 160)) for _ in range(NUM_REQUESTS // (3 if quick else 1))]
    action = "recompute" if arm == _NO_PRESSURE else arm
    core = new_core(loaded, QUANTIZATION, kv_pressure_action=action, prefix_cache="off", kv_cache_bytes=128 * 1024**2)
    send(core, random_prompt(rng, 16), 2)
    drain(core)
    if arm != _NO_PRESSURE:
        needed = sum(PROMPT_TOKENS + n for n in outputs)
        # Admission would keep the pressure away by expecting long outputs: it is taught to expect short ones.
        for _ in range(300):
            core.scheduler.expect_output(8)
        turn(core, kv_usable_ratio=needed / 2 / core.capacity_tokens)
    started_s = cpu_s()
    served = [send(core, random_prompt(rng, PROMPT_TOKENS), n) for n in outputs]
    drain(core)
    assert [s.num_tokens for s in served] == outputs
    return sum(outputs) / (cpu_s() - started_s)
