"""Speculation at several batch sizes on copy-heavy and on free text: off, always the same k, and adaptive."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.core import new_core
from benchmarks.report import Row, cpu_s
from benchmarks.techniques.serving import QUANTIZATION, send
from trimtab.engine.contract import KnobValue
from trimtab.engine.embedded.core import EngineCore
from trimtab.engine.embedded.loader import LoadedModel
from trimtab.experiments.quality import calibration_pieces

NUM_STREAMS = (1, 4, 16, 64)
ARMS: Mapping[str, dict[str, KnobValue]] = {
    "off": {"speculative_method": "off"},
    "k = 3": {"speculative_method": "ngram", "speculative_k": 3, "speculative_adaptive": "off"},
    "adaptive": {"speculative_method": "ngram", "speculative_k": 3, "speculative_adaptive": "on"},
}
MAX_SLOWER_RATIO = 0.97
_PROMPT_TOKENS, _OUTPUT_TOKENS = 96, 48


def measure(loaded: LoadedModel, seed: int, *, quick: bool) -> dict[str, float]:
    """Output tokens per CPU second of every arm, number of streams and kind of text."""
    cores = {arm: new_core(loaded, QUANTIZATION, max_num_seqs=64, prefix_cache="off", **ARMS[arm]) for arm in ARMS}
    found = {}
    for text in ("copy-heavy", "free"):
        for num_streams in NUM_STREAMS[:2] if quick else NUM_STREAMS:
            prompts = _prompts(loaded, text, num_streams, seed)
            for arm, speed in _race(cores, prompts).items():
                found[f"{text}, {num_streams}, {arm}"] = speed
    return found


def rows(rounds: list[Any]) -> list[Row]:
    made = []
    for key in rounds[0]:
        text, num_streams, arm = key.split(", ")
        if arm == "off":
            continue
        values = [r[key] for r in rounds]
        ratio = median(r[key] / r[f"{text}, {num_streams}, off"] for r in rounds)
        goal, met = None, None
        if arm == "adaptive":
            goal, met = "never more than 3 % slower", ratio >= MAX_SLOWER_RATIO
        case = f"speculation {arm}, {text} text, {num_streams} streams"
        more = {"against": "off", "ratio": ratio, "goal": goal, "met": met}
        made.append(Row.of(case, values, "output tokens per CPU second", **more))
    return made


def _race(cores: Mapping[str, EngineCore], prompts: Sequence[tuple[int, ...]]) -> dict[str, float]:
    """Output tokens per CPU second of every core, the cores taking turns by the step.

    The one that is furthest behind is next, so that all meet the same moments of a noisy machine.
    """
    served = {arm: [send(core, p, _OUTPUT_TOKENS) for p in prompts] for arm, core in cores.items()}
    spent_s = dict.fromkeys(cores, 0.0)
    while working := [arm for arm, core in cores.items() if core.has_work]:
        arm = min(working, key=lambda arm: (sum(s.num_tokens for s in served[arm]), spent_s[arm]))
        started_s = cpu_s()
        cores[arm].step()
        spent_s[arm] += cpu_s() - started_s
    assert all(s.num_tokens == _OUTPUT_TOKENS for streams in served.values() for s in streams)
    return {arm: len(prompts) * _OUTPUT_TOKENS / spent_s[arm] for arm in cores}


def _prompts(loaded: LoadedModel, text: str, number: int, seed: int) -> list[tuple[int, ...]]:
    """Free text goes on from prose; copy-heavy text has said the same several times and goes on doing so."""
    rng = random.Random(seed)
    ids = tuple(loaded.tokenizer.encode("".join(calibration_pieces(20)), parse_special=False))
    starts = [rng.randrange(len(ids) - _PROMPT_TOKENS) for _ in range(number)]
    if text == "free":
        return [ids[s : s + _PROMPT_TOKENS] for s in starts]
    return [(ids[s : s + _PROMPT_TOKENS // 4] * 4)[:_PROMPT_TOKENS] for s in starts]
