"""Whether our load generator and ``guidellm`` say the same of the same server under the same load.

Two loads, each of fixed lengths, the same prompts and greedy answers, both clients in turn on the client's core:

- arrivals at a constant rate that leaves the server idle between requests; each client makes them itself, and which
  one goes first alternates;
- guidellm's closed loop of two streams. Our generator is open loop by design, so it replays the moments at which
  guidellm sent its requests.
"""

from __future__ import annotations

import argparse
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

from benchmarks.core import QUANTIZATIONS, add_model
from benchmarks.engine_process import MODEL_NAME, engine_process
from benchmarks.guidellm import ClientFigures, Guidellm, GuidellmLoad
from benchmarks.report import Row, finish, parser, run_rounds
from trimtab.experiments.load.client_process import LoadClient
from trimtab.experiments.load.figures import load_figures
from trimtab.experiments.load.result import LoadJob, Outcome
from trimtab.experiments.workload.interface import PlannedRequest
from trimtab.experiments.workload.synthetic import prompt_text

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 32
GOAL_RATIO = 0.05
_DRAIN_S = 60.0
_METRICS = {"ttft_s": ("TTFT", "ms", 1000.0), "tpot_s": ("TPOT", "ms", 1000.0),
            "output_tokens_per_s": ("throughput", "output tokens/s", 1.0)}  # fmt: skip
_CLOSED_LOOP = "two streams"


def exact_prompts(tokenizer: Tokenizer, number: int) -> tuple[str, ...]:
    """Texts that are ``PROMPT_TOKENS`` long when they are encoded again."""
    ids = tokenizer.encode(prompt_text()).ids
    cuts = (tokenizer.decode(ids[i : i + PROMPT_TOKENS]) for i in range(0, len(ids), PROMPT_TOKENS))
    prompts = tuple(islice((c for c in cuts if len(tokenizer.encode(c).ids) == PROMPT_TOKENS), number))
    assert len(prompts) == number
    return prompts


async def our_figures(client: LoadClient, base_url: str, prompts: Sequence[str], sent_s: Sequence[float]) -> Any:
    """One load of ours with arrivals at ``sent_s``."""
    requests = tuple(
        PlannedRequest(i, at_s, prompt, OUTPUT_TOKENS)
        for i, (at_s, prompt) in enumerate(zip(sent_s, prompts, strict=True))
    )
    rate_per_s = (len(sent_s) - 1) / sent_s[-1]
    load = await client.run(LoadJob(base_url, MODEL_NAME, requests, rate_per_s, sent_s[-1], _DRAIN_S))
    lengths = {(r.prompt_tokens, r.output_tokens) for r in load.results}
    if lengths != {(PROMPT_TOKENS, OUTPUT_TOKENS)} or any(r.outcome is not Outcome.SUCCEEDED for r in load.results):
        raise SystemExit(f"our load is not the planned one: lengths {lengths}, {[r.kind for r in load.results]}")
    return ClientFigures(
        ttft_s=median(r.ttft_s or 0.0 for r in load.results),
        tpot_s=median(r.tpot_s or 0.0 for r in load.results),
        output_tokens_per_s=load_figures(load).output_tokens_per_s,
    )


def run_one_round(
    number: int, base_url: str, peer: Guidellm, prompts: tuple[str, ...], options: argparse.Namespace
) -> dict[str, float]:
    """Both clients under both loads; keys are ``CASE/CLIENT/METRIC``."""

    def theirs(profile: str) -> GuidellmLoad:
        return GuidellmLoad(base_url, MODEL_NAME, profile, prompts, PROMPT_TOKENS, OUTPUT_TOKENS)

    async def ours(sent_s: Sequence[float]) -> Any:
        async with LoadClient((options.client_cpu,)) as client:
            return await our_figures(client, base_url, prompts, sent_s)

    constant = _constant_case(options)
    found: dict[tuple[str, str], ClientFigures] = {}
    arrivals_s = [i / options.rate for i in range(len(prompts))]
    for client in ("ours", "guidellm") if number % 2 == 0 else ("guidellm", "ours"):
        if client == "ours":
            found[constant, client] = asyncio.run(ours(arrivals_s))
        else:
            found[constant, client] = peer.run(theirs(f"kind=constant,rate={options.rate}")).figures
    closed = peer.run(theirs("kind=concurrent,streams=2"))
    found[_CLOSED_LOOP, "guidellm"] = closed.figures
    found[_CLOSED_LOOP, "ours"] = asyncio.run(ours(closed.sent_s))
    return {f"{case}/{who}/{m}": v for (case, who), figures in found.items() for m, v in asdict(figures).items()}


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


def _constant_case(options: argparse.Namespace) -> str:
    return f"constant {options.rate:g}/s"


def main() -> None:
    options = parser(__doc__)
    add_model(options)
    options.add_argument("--guidellm", type=Path, required=True, help="its command, in an environment of its own")
    options.add_argument("--tokenizer", type=Path, required=True, help="the model's folder with tokenizer.json")
    options.add_argument("--quantization", default="int8", choices=QUANTIZATIONS)
    options.add_argument("--rate", type=float, default=0.5, help="requests per second of the constant load")
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
            return run_one_round(number, base_url, peer, prompts, arguments)

        rounds = run_rounds(num_rounds, run_round, arguments.json)
    finish("load_agreement", rows(rounds, (_constant_case(arguments), _CLOSED_LOOP), peer_name), arguments.json)


if __name__ == "__main__":
    main()
