"""TTFT of the chat preset's traffic at 70 % of the capacity, under each scheduling policy, against an idle engine.

Arrivals and lengths are those of ``policies/presets/chat.yaml``, at 0.7 times the rate that a full batch completes.
An idle engine's TTFT of the same prompts is what no scheduler goes below.
"""

from __future__ import annotations

import dataclasses
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.core import drain, new_core
from benchmarks.report import Row
from benchmarks.techniques.serving import QUANTIZATION, Planned, Served, send, serve, turn
from trimtab.engine.adapters.embedded import CATALOGUE
from trimtab.engine.embedded.core import EngineCore
from trimtab.engine.embedded.loader import LoadedModel
from trimtab.experiments.workload.from_policy import build_workload
from trimtab.policies.manifest import TuningPolicy
from trimtab.policies.yaml_source import parse_manifests

LOAD = 0.7
POLICIES = ("fcfs", "shortest_prefill_first")
TTFT_GOAL_S = 1.0
_BATCH, _MAX_STEP_MS = 16, 250


def measure(loaded: LoadedModel, seed: int, *, quick: bool) -> dict[str, float]:
    """p95 of TTFT and of TPOT in seconds: of every policy under load, and of TTFT on an idle engine."""
    core = new_core(loaded, QUANTIZATION, max_num_seqs=_BATCH, prefix_cache="off", max_step_ms=_MAX_STEP_MS)
    requests = _requests(loaded, seed, 6 if quick else 40)
    found = {"idle": _p95([_alone(core, r).ttft_s for r in requests])}
    rate_per_s = LOAD * _capacity(core, requests)
    planned = [dataclasses.replace(r, at_s=r.at_s / rate_per_s) for r in requests]
    first = seed % len(POLICIES)
    for policy in (*POLICIES[first:], *POLICIES[:first]):
        turn(core, scheduling_policy=policy)
        served, _ = serve(core, planned)
        found[f"{policy}, ttft"] = _p95([s.ttft_s for s in served])
        found[f"{policy}, tpot"] = _p95([s.tpot_s for s in served])
    return found


def rows(rounds: list[Any]) -> list[Row]:
    made = []
    for policy in POLICIES:
        values = [1000 * r[f"{policy}, ttft"] for r in rounds]
        ratio = median(r[f"{policy}, ttft"] / r["idle"] for r in rounds)
        case = f"chat preset at {LOAD:.0%} of the capacity, {policy}, TTFT p95"
        goal, met = f"below {1000 * TTFT_GOAL_S:.0f} ms", median(values) < 1000 * TTFT_GOAL_S
        made.append(Row.of(case, values, "ms", against="an idle engine", ratio=ratio, goal=goal, met=met))
        values = [1000 * r[f"{policy}, tpot"] for r in rounds]
        made.append(Row.of(f"chat preset at {LOAD:.0%} of the capacity, {policy}, TPOT p95", values, "ms"))
    return made


def _requests(loaded: LoadedModel, seed: int, number: int) -> list[Planned]:
    """The preset's first requests, arriving once a second on average."""
    preset = resources.files("trimtab.policies") / "presets/chat.yaml"
    (policy,) = parse_manifests(preset.read_text(), "chat.yaml", {"embedded": CATALOGUE})
    assert isinstance(policy, TuningPolicy)
    workload = build_workload(policy.spec.workload, Path(), seed=seed).held_out(seed).at_rate(1.0)
    encode = loaded.tokenizer.encode
    planned = workload.requests(4.0 * number)[:number]
    return [Planned(p.at_s, tuple(encode(p.prompt, parse_special=False)), p.output_tokens) for p in planned]


def _alone(core: EngineCore, request: Planned) -> Served:
    served = send(core, request.prompt_ids, 1)
    drain(core)
    return served


def _capacity(core: EngineCore, requests: list[Planned]) -> float:
    """Requests a second when all are there from the start."""
    _, duration_s = serve(core, [dataclasses.replace(r, at_s=0.0) for r in requests])
    return len(requests) / duration_s


def _p95(values_s: list[float]) -> float:
    return float(np.percentile(values_s, 95))
