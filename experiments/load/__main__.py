"""``python -m trimtab.experiments.load``: an open-loop load against any OpenAI-compatible server.

SIGTERM or SIGINT ends the arrivals; what is in flight is finished, the totals are written and the exit code is 0.
Exit code 1: a request was lost by the client, which is a fault of ours. Exit code 2: bad arguments.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

from trimtab.errors import WorkloadError
from trimtab.experiments.load.generator import LoadGenerator
from trimtab.experiments.load.result import LoadJob, LoadResult
from trimtab.experiments.load.totals import Totals
from trimtab.experiments.workload.interface import Workload
from trimtab.experiments.workload.synthetic import Arrivals, LogNormalTokens, SyntheticWorkload
from trimtab.experiments.workload.trace import read_trace

_WRITE_EVERY_S = 1.0


def main(arguments: list[str] | None = None) -> int:
    """Runs the load that the command line describes and returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        workload = _workload(options)
    except WorkloadError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.cpus:
        os.sched_setaffinity(0, {int(cpu) for cpu in options.cpus.split(",")})
    return asyncio.run(_run(options, workload))


async def _run(options: argparse.Namespace, workload: Workload) -> int:
    job = LoadJob(
        options.url, options.model, workload.requests(options.duration), workload.rate_per_s, options.duration,
        options.drain,
    )  # fmt: skip
    totals = Totals(options.json)
    generator = LoadGenerator(job, on_result=totals.add)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, generator.stop)
    writing = asyncio.create_task(_write_totals(generator, totals))
    try:
        load: LoadResult = await generator.run()
    finally:
        writing.cancel()
    totals.write(generator.num_sent, 0, finished=True, lag_s=load.lag_s)
    counts = totals.counts(generator.num_sent, 0)
    print(", ".join(f"{name} {count}" for name, count in counts.items()))
    return 1 if counts["lost"] else 0


async def _write_totals(generator: LoadGenerator, totals: Totals) -> None:
    while True:
        totals.write(generator.num_sent, generator.num_in_flight, finished=False)
        await asyncio.sleep(_WRITE_EVERY_S)


def _workload(options: argparse.Namespace) -> Workload:
    if options.trace is not None:
        return read_trace(options.trace, rate_per_s=options.rate, seed=options.seed)
    if options.rate is None:
        raise WorkloadError("give --rate, or --trace with a recorded one")
    workload = SyntheticWorkload(
        rate_per_s=options.rate,
        arrivals=Arrivals(options.arrivals, options.cv),
        prompt_tokens=LogNormalTokens(options.prompt_median, options.sigma, options.prompt_max),
        output_tokens=LogNormalTokens(options.output_median, options.sigma, options.output_max),
        seed=options.seed,
    )
    return workload.held_out(options.split - 1) if options.split else workload


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trimtab.experiments.load", description="Open-loop load for OpenAI servers."
    )
    parser.add_argument("--url", required=True, help="base URL, such as http://127.0.0.1:8000")
    parser.add_argument("--model", required=True, help="the name that requests use")
    parser.add_argument(
        "--json", required=True, type=Path, help="where totals are written, each second and at the end"
    )
    parser.add_argument("--rate", type=_positive, help="mean requests per second (default: a trace's own)")
    parser.add_argument(
        "--duration", type=_positive, required=True, help="seconds of arrivals, unless stopped sooner"
    )
    parser.add_argument(
        "--drain", type=_positive, default=30.0, help="seconds that answers may come after the last arrival"
    )
    parser.add_argument("--arrivals", choices=("poisson", "constant", "gamma"), default="poisson")
    parser.add_argument("--cv", type=_positive, default=1.0, help="coefficient of variation of the gaps (gamma only)")
    parser.add_argument("--prompt-median", type=int, default=256, help="prompt tokens, median")
    parser.add_argument("--prompt-max", type=int, default=1024, help="prompt tokens at most")
    parser.add_argument("--output-median", type=int, default=64, help="output tokens, median")
    parser.add_argument("--output-max", type=int, default=256, help="output tokens at most")
    parser.add_argument("--sigma", type=float, default=0.6, help="of the logarithm of both lengths; 0: all equal")
    parser.add_argument("--trace", type=Path, help="a JSONL trace instead of synthetic requests")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--split", type=int, default=0, help="0: the search's traffic; others: held-out traffic")
    parser.add_argument("--cpus", default="", help="cores to run on, such as 0,1 (default: all)")
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


if __name__ == "__main__":
    sys.exit(main())
