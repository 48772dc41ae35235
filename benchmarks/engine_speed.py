"""How fast the engine core prefills and decodes under each quantization, against fp32 in the same interleaved run.

Decoding is measured with 1 and with 16 streams of 64 prompt tokens each, from the first step in which every stream
decodes; prefill is one prompt of 512 tokens, in the chunks that the default knobs cut it into, up to its first
token. One thread.
"""

from __future__ import annotations

import random
from statistics import median
from typing import Any

import torch

from benchmarks.core import add_model, drain, fill, new_core, random_prompt, submit
from benchmarks.report import Row, cpu_s, finish, parser, run_rounds
from trimtab.engine.embedded.core import EngineCore
from trimtab.engine.embedded.generation import Emission
from trimtab.engine.embedded.loader import load_model
from trimtab.engine.embedded.quantization import QUANTIZATIONS

PREFILL_TOKENS = 512
PROMPT_TOKENS = 64
NUM_STREAMS = (1, 16)
_CASES = (*(f"decode, {n} stream{'s' if n > 1 else ''}" for n in NUM_STREAMS), f"prefill, {PREFILL_TOKENS} tokens")


def decode_tokens_per_s(core: EngineCore, num_streams: int, num_steps: int, rng: random.Random) -> float:
    # Filling takes several steps, in which the streams that came first decode already: hence the slack.
    fill(core, num_streams, PROMPT_TOKENS, num_steps + num_streams + 1, rng)
    started_s = cpu_s()
    for _ in range(num_steps):
        core.step()
    elapsed_s = cpu_s() - started_s
    assert core.scheduler.num_running == num_streams
    drain(core)
    return num_streams * num_steps / elapsed_s


def prefill_tokens_per_s(core: EngineCore, rng: random.Random) -> float:
    received: list[Emission] = []
    submit(core, random_prompt(rng, PREFILL_TOKENS), 1, received)
    started_s = cpu_s()
    drain(core)
    elapsed_s = cpu_s() - started_s
    assert sum(len(e.token_ids) for e in received) == 1
    return PREFILL_TOKENS / elapsed_s


def measure(core: EngineCore, num_steps: int, seed: int) -> dict[str, float]:
    """Tokens per second of each case."""
    rng = random.Random(seed)
    decode = [decode_tokens_per_s(core, n, num_steps, rng) for n in NUM_STREAMS]
    return dict(zip(_CASES, (*decode, prefill_tokens_per_s(core, rng)), strict=True))


def rows(rounds: list[Any]) -> list[Row]:
    made = []
    for case in _CASES:
        base = [r[f"fp32, {case}"] for r in rounds]
        for quantization in QUANTIZATIONS:
            values = [r[f"{quantization}, {case}"] for r in rounds]
            against, ratio = None, None
            if quantization != "fp32":
                against, ratio = "fp32", median(v / b for v, b in zip(values, base, strict=True))
            spread = (min(values), max(values))
            made.append(
                Row(f"{quantization}, {case}", median(values), "tokens per CPU second", against, ratio, *spread)
            )
    return made


def main() -> None:
    options = parser(__doc__)
    add_model(options)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    cores = {q: new_core(load_model(arguments.model, q), q) for q in QUANTIZATIONS}
    num_steps, num_rounds = (12, 1) if arguments.quick else (32, 5)
    for core in cores.values():
        measure(core, 2, seed=-1)  # first passes pay for oneDNN's primitives and for touching the pool

    def run_round(number: int) -> dict[str, float]:
        # Another one begins each round, so that a machine that slows down favours none.
        turn = number % len(QUANTIZATIONS)
        found: dict[str, float] = {}
        for quantization in (*QUANTIZATIONS[turn:], *QUANTIZATIONS[:turn]):
            measured = measure(cores[quantization], num_steps, number)
            found |= {f"{quantization}, {case}": value for case, value in measured.items()}
        return found

    finish("engine_speed", rows(run_rounds(num_rounds, run_round, arguments.json)), arguments.json)


if __name__ == "__main__":
    main()
