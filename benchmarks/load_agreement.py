"""Whether our load generator and ``guidellm`` say the same of the same server under the same load.

Arrivals at a constant rate, the same prompts of fixed length, greedy answers of fixed length; both clients make the
arrivals themselves, in turn, on the client's core, and which one goes first alternates. At the lower rate the server
is idle between requests, at the higher one they overlap. guidellm's closed loops are left out: our generator is open
loop by design, and replaying a closed loop's moments is another load as soon as the server's speed changes.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from tokenizers import Tokenizer

from benchmarks.core import add_model
from benchmarks.engine_process import MODEL_NAME, engine_process
from benchmarks.guidellm import ClientFigures, Guidellm, GuidellmLoad
from benchmarks.report import Row, finish, parser, run_rounds
from trimtab.engine.embedded.quantization import QUANTIZATIONS
from trimtab.experiments.load.client_process import LoadClient
from trimtab.experiments.load.figures import load_figures
from trimtab.experiments.load.result import LoadJob, Outcome
from trimtab.experiments.workload.interface import PlannedRequest
from trimtab.experiments.workload.synthetic import prompt_text

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 32
RATES_PER_S = (0.5, 0.75)
GOAL_RATIO = 0.05
_DRAIN_S = 60.0
_METRICS = {"ttft_s": ("TTFT", "ms", 1000.0), "tpot_s": ("TPOT", "ms", 1000.0),
            "output_tokens_per_s": ("throughput", "output tokens/s", 1.0)}  # fmt: skip


def exact_prompts(tokenizer: Tokenizer, number: int) -> tuple[str, ...]:
    """Texts that are ``PROMPT_TOKENS`` long when they are encoded again."""
    ids = tokenizer.encode(prompt_text()).ids
    cuts = (tokenizer.decode(ids[i : i + PROMPT_TOKENS]) for i in range(0, len(ids), PROMPT_TOKENS))
    prompts = tuple(islice((c for c in cuts if len(tokenizer.encode(c).ids) == PROMPT_TOKENS), number))
    assert len(prompts) == number
    return prompts


async def our_figures(client_cpu: int, base_url: str, prompts: Sequence[str], rate_per_s: float) -> ClientFigures:
    """One load of ours."""
    requests = tuple(PlannedRequest(i, i / rate_per_s, prompt, OUTPUT_TOKENS) for i, prompt in enumerate(prompts))
    # The load ends with its last arrival, so that both clients divide by the time up to the last token.
    job = LoadJob(base_url, MODEL_NAME, requests, rate_per_s, requests[-1].at_s, _DRAIN_S)
    async with LoadClient((client_cpu,)) as client:
        load = await client.run(job)
    lengths = {(r.prompt_tokens, r.output_tokens) for r in load.results}
    if lengths != {(PROMPT_TOKENS, OUTPUT_TOKENS)} or any(r.outcome is not Outcome.SUCCEEDED for r in load.results):
        raise SystemExit(f"our load is not the planned one: lengths {lengths}, {[r.kind for r in load.results]}")
    return ClientFigures(
        ttft_s=median(r.ttft_s or 0.0 for r in load.results),
        tpot_s=median(r.tpot_s or 0.0 for r in load.results),
        output_tokens_per_s=load_figures(load).output_tokens_per_s,
    )


def run_one_round(
    number: int, base_url: str, peer: Guidellm, prompts: tuple[str, ...], client_cpu: int
) -> dict[str, float]:
    """Both clients at both rates; keys are ``CASE/CLIENT/METRIC``."""
    found: dict[str, float] = {}
    for rate_per_s in RATES_PER_S:
        for client in ("ours", "guidellm") if number % 2 == 0 else ("guidellm", "ours"):
            if client == "ours":
                figures = asyncio.run(our_figures(client_cpu, base_url, prompts, rate_per_s))
            else:
                profile = f"kind=constant,rate={rate_per_s}"
                load = GuidellmLoad(base_url, MODEL_NAME, profile, prompts, PROMPT_TOKENS, OUTPUT_TOKENS)
                figures = peer.run(load)
            found |= {f"{_case(rate_per_s)}/{client}/{metric}": v for metric, v in asdict(figures).items()}
    return found


def _case(rate_per_s: float) -> str:
    return f"constant {rate_per_s:g}/s"


def rows(rounds: list[Any], cases: Sequence[str], peer: str) -> list[Row]:
    made = []
    for case in cases:
        for metric, (label, unit, scale) in _METRICS.items():
            ours, theirs = ([r[f"{case}/{who}/{metric}"] * scale for r in rounds] for who in ("ours", "guidellm"))
            ratio = median(a / b for a, b in zip(ours, theirs, strict=True))
            made += [
                Row(f"{case}, {label}, {peer}", median(theirs), unit, low=min(theirs), high=max(theirs)),
                Row(
                    f"{case}, {label}, ours", median(ours), unit, peer, ratio, min(ours), max(ours),
                    f"within {GOAL_RATIO:.0%}", abs(ratio - 1) <= GOAL_RATIO,
                ),
            ]  # fmt: skip
    return made


def main() -> None:
    options = parser(__doc__)
    add_model(options)
    options.add_argument("--guidellm", type=Path, required=True, help="its command, in an environment of its own")
    options.add_argument("--tokenizer", type=Path, required=True, help="the model's folder with tokenizer.json")
    options.add_argument("--quantization", default="int8", choices=QUANTIZATIONS)
    options.add_argument("--engine-cpu", type=int, default=0, help="the engine's core")
    options.add_argument("--client-cpu", type=int, default=1, help="the core of both clients")
    arguments = options.parse_args()
    os.sched_setaffinity(0, {arguments.client_cpu})  # guidellm inherits it
    num_requests, num_rounds = (8, 3) if arguments.quick else (12, 5)
    prompts = exact_prompts(Tokenizer.from_file(str(arguments.tokenizer / "tokenizer.json")), num_requests)
    knobs = {"quantization": arguments.quantization, "num_threads": 1}
    with (
        tempfile.TemporaryDirectory() as folder,
        engine_process(arguments.model, knobs, arguments.engine_cpu) as base_url,
    ):
        binary, tokenizer = arguments.guidellm.absolute(), arguments.tokenizer.absolute()
        peer = Guidellm(binary, tokenizer, Path(folder))
        peer_name = f"guidellm {peer.version}"

        def run_round(number: int) -> dict[str, float]:
            return run_one_round(number, base_url, peer, prompts, arguments.client_cpu)

        rounds = run_rounds(num_rounds, run_round, arguments.json)
    finish("load_agreement", rows(rounds, [_case(rate) for rate in RATES_PER_S], peer_name), arguments.json)


if __name__ == "__main__":
    main()
