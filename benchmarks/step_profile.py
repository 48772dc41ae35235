"""Where one decode step's time goes: the costliest tensor operations of a batch, by name and shape, and the rest.

The profiler slows a step down by its own bookkeeping, so each operation's share of the profiled step is what counts;
``value`` is that share of the time of a step without the profiler. "Outside operations" is what no tensor operation
took: Python in the scheduler, the runner and the core.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.core import add_model, drain, fill, new_core
from benchmarks.report import Row, cpu_s, finish, parser, run_rounds
from trimtab.engine.embedded.core import EngineCore
from trimtab.engine.embedded.loader import load_model

PROFILED = ("int4", "bf16")
NUM_STREAMS = 16
PROMPT_TOKENS = 64
NUM_LARGEST = 6
OUTSIDE = "outside operations"


def profile_steps(core: EngineCore, num_steps: int, seed: int) -> dict[str, float]:
    """Seconds of a step by operation, scaled to the time of an unprofiled step, whose time is ``step``."""
    # Half of the steps are timed alone, half are profiled, and filling takes up to one step a stream.
    num_tokens = 2 * num_steps + NUM_STREAMS + 1
    fill(core, NUM_STREAMS, PROMPT_TOKENS, num_tokens, random.Random(seed))
    step_s = _time_of_step(core, num_steps, cpu_s)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        profiled_s = _time_of_step(core, num_steps, time.monotonic)  # the profiler's clock is the wall's
    drain(core)
    found: dict[str, float] = {}
    for event in profiler.key_averages(group_by_input_shape=True):
        name = f"{event.key} {_shapes(event.input_shapes)}"
        found[name] = found.get(name, 0.0) + event.self_cpu_time_total / 1e6 / num_steps
    found[OUTSIDE] = max(0.0, profiled_s - sum(found.values()))
    return {"step": step_s} | {name: seconds * step_s / profiled_s for name, seconds in found.items()}


def _time_of_step(core: EngineCore, num_steps: int, clock: Callable[[], float]) -> float:
    started_s = clock()
    for _ in range(num_steps):
        core.step()
    return (clock() - started_s) / num_steps


def _shapes(shapes: list[Any]) -> str:
    """The tensors' shapes; scalars and missing arguments have none."""
    return " x ".join("[" + ",".join(map(str, shape)) + "]" for shape in shapes if shape)


def rows(rounds: list[Any]) -> list[Row]:
    made = []
    for quantization in PROFILED:
        taken = [{k[len(quantization) + 1 :]: v for k, v in r.items() if k.startswith(quantization)} for r in rounds]
        steps_ms = [t["step"] * 1000 for t in taken]
        case = f"{quantization}, {NUM_STREAMS} streams"
        made.append(Row(f"{case}, step", median(steps_ms), "CPU ms", low=min(steps_ms), high=max(steps_ms)))
        names = {name for t in taken for name in t if name != "step"}
        costs = {name: [t.get(name, 0.0) * 1000 for t in taken] for name in names}
        largest = sorted(costs, key=lambda name: -median(costs[name]))[:NUM_LARGEST]
        for name in largest:
            ratio = median(cost / step for cost, step in zip(costs[name], steps_ms, strict=True))
            spread = (min(costs[name]), max(costs[name]))
            made.append(Row(f"{case}, {name}", median(costs[name]), "CPU ms", "the step", ratio, *spread))
    return made


def main() -> None:
    options = parser(__doc__)
    add_model(options)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    cores = {q: new_core(load_model(arguments.model, q), q) for q in PROFILED}
    num_steps, num_rounds = (8, 1) if arguments.quick else (24, 5)

    def run_round(number: int) -> dict[str, float]:
        measured = {q: profile_steps(core, num_steps, number) for q, core in cores.items()}
        return {f"{q} {name}": value for q, found in measured.items() for name, value in found.items()}

    finish("step_profile", rows(run_rounds(num_rounds, run_round, arguments.json)), arguments.json)


if __name__ == "__main__":
    main()
