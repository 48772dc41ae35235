"""Continuous against static batching on the real engine core, and how much of the KV pool sequences can use.

Both arms serve the same requests (log-normal output lengths, median 64 and p99 512 tokens) in batches of up to 16.
The static arm admits a batch only when the last one has finished, and its finished rows still compute: every row runs
to the longest output of its batch, and only the wanted tokens count.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from benchmarks.core import add_model, drain, new_core, random_prompt, submit
from benchmarks.report import Row, cpu_s, finish, parser, run_rounds
from trimtab.engine.embedded.core import EngineCore
from trimtab.engine.embedded.generation import Emission
from trimtab.engine.embedded.kv.allocator import BlockAllocator
from trimtab.engine.embedded.kv.pages import Pages
from trimtab.engine.embedded.loader import load_model
from trimtab.engine.embedded.quantization import QUANTIZATIONS
from trimtab.kernels.kv_cache import KVType

BATCH = 16
NUM_BLOCKS = 1456  # 512 MiB of SmolLM2-135M in bf16
MEDIAN_TOKENS, P99_TOKENS = 64, 512
_SIGMA = math.log(P99_TOKENS / MEDIAN_TOKENS) / 2.3263  # the standard normal's 99th percentile


@dataclass(frozen=True, slots=True)
class Shape:
    prompt_ids: tuple[int, ...]
    output_tokens: int


def shapes(number: int, seed: int) -> list[Shape]:
    rng = random.Random(seed)
    made = []
    for _ in range(number):
        prompt = random_prompt(rng, rng.randint(16, 48))
        made.append(Shape(prompt, min(2048, max(1, round(rng.lognormvariate(math.log(MEDIAN_TOKENS), _SIGMA))))))
    return made


def continuous_tokens_per_s(core: EngineCore, wanted: list[Shape]) -> float:
    received: list[Emission] = []
    started_s = cpu_s()
    for shape in wanted:
        submit(core, shape.prompt_ids, shape.output_tokens, received)
    drain(core)
    elapsed_s = cpu_s() - started_s
    assert sum(len(e.token_ids) for e in received) == sum(s.output_tokens for s in wanted)
    return sum(s.output_tokens for s in wanted) / elapsed_s


def static_tokens_per_s(core: EngineCore, wanted: list[Shape]) -> float:
    received: list[Emission] = []
    started_s = cpu_s()
    for start in range(0, len(wanted), BATCH):
        batch = wanted[start : start + BATCH]
        longest = max(s.output_tokens for s in batch)
        for shape in batch:
            submit(core, shape.prompt_ids, longest, received)
        drain(core)
    return sum(s.output_tokens for s in wanted) / (cpu_s() - started_s)


def usable_ratio(seed: int) -> float:
    """The share of a pool's token slots that hold tokens when sequences of random lengths have filled it."""
    rng = random.Random(seed)
    blocks, stored = BlockAllocator(Pages(NUM_BLOCKS, {KVType.FULL: 1}), 16), 0
    for sequence_id in range(100_000):
        num_tokens = min(8192, max(1, round(rng.lognormvariate(math.log(256), 0.8))))
        fitting = min(num_tokens, (NUM_BLOCKS - blocks.owned_units) * blocks.block_size)
        blocks.grow(sequence_id, fitting)
        stored += fitting
        if fitting < num_tokens:
            break
    return stored / blocks.capacity_tokens


def rows(rounds: list[Any]) -> list[Row]:
    continuous, static = ([r[arm] for r in rounds] for arm in ("continuous", "static"))
    ratios = [c / s for c, s in zip(continuous, static, strict=True)]
    usable = [usable_ratio(seed) for seed in range(20)]
    unit = "wanted output tokens per CPU second"
    return [
        Row("static batching, 16 rows", median(static), unit, low=min(static), high=max(static)),
        Row(
            "continuous batching, 16 rows", median(continuous), unit, "static batching", median(ratios),
            min(continuous), max(continuous), "faster than static batching", min(ratios) > 1.0,
        ),
        Row(
            "KV pool usable by sequences of random lengths", median(usable), "share of token slots",
            low=min(usable), high=max(usable), goal="at least 0.95", met=min(usable) >= 0.95,
        ),
    ]  # fmt: skip


def main() -> None:
    options = parser(__doc__)
    add_model(options)
    options.add_argument("--quantization", default="bf16", choices=QUANTIZATIONS)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    loaded = load_model(arguments.model, arguments.quantization)
    number, num_rounds = (32, 1) if arguments.quick else (48, 5)

    def run_round(seed: int) -> dict[str, float]:
        core, wanted = new_core(loaded, arguments.quantization, max_num_seqs=BATCH), shapes(number, seed)
        arms = {"continuous": continuous_tokens_per_s, "static": static_tokens_per_s}
        # The order alternates, so that a machine that slows down favours neither.
        order = list(arms) if seed % 2 == 0 else list(arms)[::-1]
        return {arm: arms[arm](core, wanted) for arm in order}

    finish("continuous_batching", rows(run_rounds(num_rounds, run_round, arguments.json)), arguments.json)


if __name__ == "__main__":
    main()
