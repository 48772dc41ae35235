"""Quality through the engine's HTTP interface: KL divergence from the reference, and perplexity.

KL is the mean over tokens of KL(reference || candidate) in nats over the reference's top 20 tokens plus a remainder
bucket, from prompt log-probabilities on the calibration text. A reference token that the candidate does not report
counts with the candidate's smallest reported top-20 probability, and the remainder with 1 minus the candidate's
reported mass of the set. Both are upper bounds on the candidate, so each position's sum, floored at 0, is a lower
bound on the true divergence, and garbage still scores high. The engine tokenizes; token ids come from its answers.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt

from trimtab.engine.contract import EngineEndpoint
from trimtab.errors import EngineCallError
from trimtab.policies.figures import QualityFigures

TOP_TOKENS = 20
PIECE_CHARACTERS = 2000  # about 500 tokens, each piece a prompt of its own
_REQUEST_TIMEOUT_S = 120.0
_SMALLEST_PROBABILITY = 1e-12

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PromptScores:
    """What an engine says of every calibration token but each piece's first.

    ``others`` holds what was reported beyond the top 20: the token at hand, with id −1 where there is none.
    """

    top_ids: Ints  # [num_tokens, 20], falling by log-probability
    top_logprobs: Floats  # [num_tokens, 20]
    actual_logprobs: Floats  # [num_tokens]
    other_ids: Ints  # [num_tokens]
    other_logprobs: Floats  # [num_tokens]


@dataclass(frozen=True, slots=True)
class ReferenceKey:
    """What a stored reference belongs to; another model, engine, hardware or text makes it stale."""

    model_digest: str
    engine_version: str
    hardware: str
    num_pieces: int

    @property
    def file_name(self) -> str:
        text = "\n".join(
            (self.model_digest, self.engine_version, self.hardware, *calibration_pieces(self.num_pieces))
        )
        return f"reference-{hashlib.sha256(text.encode()).hexdigest()[:24]}.npz"


def calibration_pieces(num_pieces: int) -> tuple[str, ...]:
    """The first ``num_pieces`` pieces of the calibration text that ships with the project."""
    text = (resources.files("trimtab.experiments.texts") / "calibration.txt").read_text(encoding="utf-8")
    pieces = [text[i : i + PIECE_CHARACTERS] for i in range(0, len(text) - PIECE_CHARACTERS + 1, PIECE_CHARACTERS)]
    return tuple(pieces[:num_pieces])


async def read_scores(http: aiohttp.ClientSession, endpoint: EngineEndpoint, pieces: Sequence[str]) -> PromptScores:
    """Asks one engine for its prompt log-probabilities, piece by piece.

    Raises:
        EngineCallError: the engine does not answer, or not with prompt log-probabilities.
    """
    parts = [await _read_piece(http, endpoint, piece) for piece in pieces]
    return PromptScores(
        top_ids=np.concatenate([p.top_ids for p in parts]),
        top_logprobs=np.concatenate([p.top_logprobs for p in parts]),
        actual_logprobs=np.concatenate([p.actual_logprobs for p in parts]),
        other_ids=np.concatenate([p.other_ids for p in parts]),
        other_logprobs=np.concatenate([p.other_logprobs for p in parts]),
    )


def compare(reference: PromptScores, candidate: PromptScores) -> QualityFigures:
    """KL and perplexity of ``candidate`` against ``reference``.

    Raises:
        EngineCallError: the two did not tokenize the text alike, or a figure is not finite.
    """
    if len(reference.actual_logprobs) != len(candidate.actual_logprobs):
        raise EngineCallError(
            f"the engine scored {len(candidate.actual_logprobs)} calibration tokens, the reference "
            f"{len(reference.actual_logprobs)}: they do not tokenize alike"
        )
    figures = QualityFigures(
        kl_nats=float(np.mean(kl_lower_bounds(reference, candidate))),
        perplexity=float(np.exp(-np.mean(candidate.actual_logprobs))),
        reference_perplexity=float(np.exp(-np.mean(reference.actual_logprobs))),
        num_tokens=len(candidate.actual_logprobs),
    )
    if not all(map(np.isfinite, (figures.kl_nats, figures.perplexity, figures.reference_perplexity))):
        raise EngineCallError("the engine's log-probabilities are not finite")
    return figures


def kl_lower_bounds(reference: PromptScores, candidate: PromptScores) -> Floats:
    """The divergence of each position in nats, as the module defines it.  # [num_tokens]"""
    p = np.exp(reference.top_logprobs)
    q, reported = _candidate_probabilities(reference.top_ids, candidate)
    p_rest = np.clip(1.0 - p.sum(axis=1), 0.0, 1.0)
    q_rest = np.clip(1.0 - np.where(reported, q, 0.0).sum(axis=1), _SMALLEST_PROBABILITY, 1.0)
    listed = (p * (reference.top_logprobs - np.log(np.maximum(q, _SMALLEST_PROBABILITY)))).sum(axis=1)
    rest = p_rest * np.log(np.maximum(p_rest, _SMALLEST_PROBABILITY) / q_rest)
    bounds: Floats = np.maximum(0.0, listed + rest)
    return bounds


def _candidate_probabilities(ids: Ints, candidate: PromptScores) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """The candidate's probability of each id, or its smallest of the top 20, and whether it was reported."""
    q = np.repeat(np.exp(candidate.top_logprobs.min(axis=1, keepdims=True)), ids.shape[1], axis=1)
    reported = np.zeros(ids.shape, dtype=np.bool_)
    known_ids = np.concatenate([candidate.top_ids, candidate.other_ids[:, None]], axis=1)
    known_logprobs = np.concatenate([candidate.top_logprobs, candidate.other_logprobs[:, None]], axis=1)
    for column in range(known_ids.shape[1]):
        same = ids == known_ids[:, column : column + 1]
        q = np.where(same, np.exp(known_logprobs[:, column : column + 1]), q)
        reported |= same
    return q, reported


def load_reference(folder: Path, key: ReferenceKey) -> PromptScores | None:
    """The stored reference, or ``None`` when there is none or its file is damaged."""
    try:
        with (folder / key.file_name).open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return PromptScores(**{name: stored[name] for name in PromptScores.__slots__})
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return None


def store_reference(folder: Path, key: ReferenceKey, scores: PromptScores) -> None:
    """Writes the reference at once or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as part:
        np.savez_compressed(part, **{name: getattr(scores, name) for name in PromptScores.__slots__})
    os.replace(part.name, folder / key.file_name)


async def _read_piece(http: aiohttp.ClientSession, endpoint: EngineEndpoint, piece: str) -> PromptScores:
    body = {
        "model": endpoint.model,
        "prompt": piece,
        "max_tokens": 0,
        "temperature": 0,
        "echo": True,
        "logprobs": TOP_TOKENS,
        "prompt_logprobs": TOP_TOKENS,
    }
    url = f"{endpoint.base_url}/v1/completions"
    try:
        async with http.post(url, json=body, timeout=aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S)) as response:
            if response.status != 200:
                raise EngineCallError(f"POST {url} answered {response.status}: {(await response.text())[:300]}")
            choice = (await response.json())["choices"][0]
            positions = choice["prompt_logprobs"][1:]
            actual = choice["logprobs"]["token_logprobs"][1 : len(positions) + 1]
            return _piece_scores(positions, actual)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise EngineCallError(f"POST {url}: {type(error).__name__}: {error}") from error
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineCallError(f"POST {url}: no prompt log-probabilities in the answer ({error!r})") from error


def _piece_scores(positions: Sequence[Mapping[str, Any]], actual: Sequence[float]) -> PromptScores:
    num_tokens = len(positions)
    top_ids = np.empty((num_tokens, TOP_TOKENS), dtype=np.int64)
    top_logprobs = np.empty((num_tokens, TOP_TOKENS))
    other_ids = np.full(num_tokens, -1, dtype=np.int64)
    other_logprobs = np.zeros(num_tokens)
    for i, position in enumerate(positions):
        ranked = sorted(((float(e["logprob"]), int(token)) for token, e in position.items()), reverse=True)
        if len(ranked) < TOP_TOKENS:
            raise ValueError(f"{len(ranked)} tokens at a position, {TOP_TOKENS} needed")
        top_logprobs[i] = [logprob for logprob, _ in ranked[:TOP_TOKENS]]
        top_ids[i] = [token for _, token in ranked[:TOP_TOKENS]]
        if len(ranked) > TOP_TOKENS:
            other_logprobs[i], other_ids[i] = ranked[TOP_TOKENS]
    return PromptScores(top_ids, top_logprobs, np.asarray(actual, dtype=np.float64), other_ids, other_logprobs)
