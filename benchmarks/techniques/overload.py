"""Goodput against load, from 0.2 to 3 times the capacity: what is refused in time leaves the others their SLO.

Requests arrive at random (Poisson) and are served in wall-clock time. The capacity is what a closed loop with a full
batch completes. Goodput counts the requests a second whose TTFT and TPOT kept the SLO, which is set from an idle
engine's own figures, so that it means the same on any machine.
"""

from __future__ import annotations

import random
import time
from statistics import median
from typing import Any

from benchmarks.core import drain, new_core, random_prompt
from benchmarks.report import Row
from benchmarks.techniques.serving import QUANTIZATION, Planned, send, serve, turn
from trimtab.engine.embedded.core import EngineCore
from trimtab.engine.embedded.loader import LoadedModel

LOADS = (0.2, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0)
KEPT_RATIO = 0.85
_PROMPT_TOKENS, _BATCH = 64, 16
_OUTPUTS = (16, 32, 64)


def measure(loaded: LoadedModel, seed: int, *, quick: bool) -> dict[str, float]:
    core = new_core(loaded, QUANTIZATION, max_num_seqs=_BATCH, prefix_cache="off", max_num_batched_tokens=256)
    rng = random.Random(seed)
    capacity, ttft_slo_s, tpot_slo_s = _capacity(core, rng, 8 if quick else 3 * _BATCH)
    # Half of the SLO may pass in the queue; the other half is for the prompt itself, beside others.
    turn(core, max_queue_ms=max(10, round(1000 * ttft_slo_s / 2)), max_step_ms=max(1, round(1000 * tpot_slo_s)))
    found = {"capacity": capacity}
    for load in LOADS:
        served, duration_s = serve(core, _arrivals(rng, load * capacity, 4.0 if quick else 20.0))
        good = [s for s in served if not s.refused and s.ttft_s <= ttft_slo_s and s.tpot_s <= tpot_slo_s]
        found[f"{load}"] = len(good) / duration_s
    return found


def rows(rounds: list[Any]) -> list[Row]:
    made = []
    for load in LOADS:
        values = [r[f"{load}"] for r in rounds]
        ratio = median(r[f"{load}"] / max(r[f"{x}"] for x in LOADS) for r in rounds)
        goal, met = (f"at least {KEPT_RATIO:.0%} of the peak", ratio >= KEPT_RATIO) if load == 2.0 else (None, None)
        case = f"goodput at {load} times the capacity"
        made.append(Row.of(case, values, "requests/s", against="its peak", ratio=ratio, goal=goal, met=met))
    return made


def _capacity(core: EngineCore, rng: random.Random, num_requests: int) -> tuple[float, float, float]:
    """Requests a second with a full batch, and the SLO: 20 times an idle engine's TTFT, twice a full batch's TPOT."""
    alone = send(core, random_prompt(rng, _PROMPT_TOKENS), 8)
    drain(core)
    alone = send(core, random_prompt(rng, _PROMPT_TOKENS), 8)
    drain(core)
    started_s = time.monotonic()
    served = [send(core, random_prompt(rng, _PROMPT_TOKENS), rng.choice(_OUTPUTS)) for _ in range(num_requests)]
    drain(core)
    duration_s = time.monotonic() - started_s
    return num_requests / duration_s, 20 * alone.ttft_s, 2 * median(s.tpot_s for s in served)


def _arrivals(rng: random.Random, rate_per_s: float, duration_s: float) -> list[Planned]:
    planned = []
    at_s = rng.expovariate(rate_per_s)
    while at_s < duration_s:
        planned.append(Planned(at_s, random_prompt(rng, _PROMPT_TOKENS), rng.choice(_OUTPUTS)))
        at_s += rng.expovariate(rate_per_s)
    return planned
