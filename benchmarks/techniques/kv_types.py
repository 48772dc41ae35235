"""Keys and values as int8 and int4 against bf16: how much fits, how fast it decodes, what it costs in quality."""

from __future__ import annotations

import random
from statistics import median
from typing import Any

import numpy as np

from benchmarks.core import drain, fill, new_core
from benchmarks.report import Row, cpu_s
from benchmarks.techniques.serving import QUANTIZATION, submit
from trimtab.engine.embedded.loader import LoadedModel
from trimtab.engine.embedded.sampling import SamplingParams
from trimtab.engine.embedded.scoring import TokenScores
from trimtab.experiments.quality import PromptScores, calibration_pieces, kl_lower_bounds

TYPES = ("auto", "int8", "int4")
SEQUENCE_TOKENS = 512
NUM_STREAMS = 16
_POOL_BYTES = 256 * 1024**2


def measure(loaded: LoadedModel, seed: int, *, quick: bool) -> dict[str, float]:
    found: dict[str, float] = {}
    scores: dict[str, PromptScores] = {}
    turn = seed % len(TYPES)
    for kv_type in (*TYPES[turn:], *TYPES[:turn]):
        core = new_core(loaded, QUANTIZATION, kv_cache_dtype=kv_type, kv_cache_bytes=_POOL_BYTES, prefix_cache="off")
        found[f"{kv_type}, batch"] = core.capacity_tokens // SEQUENCE_TOKENS
        num_steps = 4 if quick else 16
        fill(core, NUM_STREAMS, 384, num_steps + NUM_STREAMS + 1, random.Random(seed))
        started_s = cpu_s()
        for _ in range(num_steps):
            core.step()
        found[f"{kv_type}, speed"] = NUM_STREAMS * num_steps / (cpu_s() - started_s)
        drain(core)
        scores[kv_type] = _scores(core, loaded, 1 if quick else 4)
    for kv_type in TYPES[1:]:
        found[f"{kv_type}, kl"] = float(np.mean(kl_lower_bounds(scores["auto"], scores[kv_type])))
    return found


def rows(rounds: list[Any]) -> list[Row]:
    made = []
    for what, unit in (("batch", f"sequences of {SEQUENCE_TOKENS} tokens"), ("speed", "tokens per CPU second")):
        for kv_type in TYPES[1:]:
            values = [r[f"{kv_type}, {what}"] for r in rounds]
            ratio = median(v / r[f"auto, {what}"] for v, r in zip(values, rounds, strict=True))
            case = f"KV {kv_type}, {'largest batch' if what == 'batch' else f'decode, {NUM_STREAMS} streams'}"
            made.append(Row(case, median(values), unit, "KV bf16", ratio, min(values), max(values)))
    for kv_type in TYPES[1:]:
        made.append(Row.of(f"KV {kv_type}, KL from KV bf16", [r[f"{kv_type}, kl"] for r in rounds], "nats"))
    return made


def _scores(core: Any, loaded: LoadedModel, num_pieces: int) -> PromptScores:
    parts = []
    for piece in calibration_pieces(num_pieces):
        params = SamplingParams(max_output_tokens=0, temperature=0.0, num_prompt_logprobs=20)
        ids = tuple(loaded.tokenizer.encode(piece, parse_special=False))
        served = submit(core, ids, params)
        drain(core)
        parts += [e.prompt_scores for e in served.emissions if e.prompt_scores is not None]
    joined = TokenScores.joined(parts)
    top_logprobs = joined.top_logprobs.astype(np.float64)
    actual = joined.logprobs.astype(np.float64)
    return PromptScores(joined.top_ids, top_logprobs, actual, joined.token_ids, actual)
