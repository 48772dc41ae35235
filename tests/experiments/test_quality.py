"""KL against hand-computed values, its lower-bound property, and the whole path over HTTP."""

from pathlib import Path

import aiohttp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.engine.fake_server import FakeEngine, FakeScript, fake_distribution, fake_tokens
from trimtab.errors import EngineCallError
from trimtab.experiments import quality
from trimtab.experiments.quality import PromptScores, ReferenceKey, calibration_pieces, compare, kl_lower_bounds

KEY = ReferenceKey("digest", "0.1.0", "cpu", 1)


def scores(logs: np.ndarray, actual: np.ndarray) -> PromptScores:
    """What an engine with these log-probabilities reports.  # logs [num_tokens, vocabulary]"""
    order = np.argsort(-logs, axis=1)
    top = order[:, :20]
    rows = np.arange(len(logs))
    inside = (top == actual[:, None]).any(axis=1)
    return PromptScores(
        top_ids=top,
        top_logprobs=np.take_along_axis(logs, top, axis=1),
        actual_logprobs=logs[rows, actual],
        other_ids=np.where(inside, -1, actual),
        other_logprobs=np.where(inside, 0.0, logs[rows, actual]),
    )


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def hand_made(top: list[tuple[int, float]], other: tuple[int, float] | None = None) -> PromptScores:
    """One position whose top 20 begins with ``top`` (id, probability) and goes on with tiny ones."""
    filled = top + [(1000 + i, 1e-9) for i in range(20 - len(top))]
    ids = np.array([[i for i, _ in filled]])
    logs = np.log(np.array([[p for _, p in filled]]))
    token, probability = other or (-1, 1.0)
    return PromptScores(ids, logs, logs[:, 0], np.array([token]), np.log(np.array([probability])))


def test_kl_of_reported_tokens_is_the_hand_computed_one() -> None:
    reference = hand_made([(1, 0.5), (2, 0.25)])
    candidate = hand_made([(1, 0.25), (2, 0.25)])
    # 0.5 ln(0.5/0.25) + 0.25 ln 1 + 0.25 ln(0.25/0.5)
    assert kl_lower_bounds(reference, candidate)[0] == pytest.approx(0.5 * np.log(2) - 0.25 * np.log(2), abs=1e-6)


def test_an_unreported_token_counts_with_the_smallest_reported_probability_and_the_rest_with_what_is_left() -> None:
    reference = hand_made([(1, 0.6), (2, 0.3)])
    filler = [(2000 + i, 0.01) for i in range(19)]
    candidate = hand_made([(1, 0.5), *filler])
    # token 2 is not reported: 0.01; the 18 tiny reference tokens and the remainder of 0.1 meet 1 - 0.5
    expected = 0.6 * np.log(0.6 / 0.5) + 0.3 * np.log(0.3 / 0.01) + 0.1 * np.log(0.1 / 0.5)
    assert kl_lower_bounds(reference, candidate)[0] == pytest.approx(expected, abs=1e-6)


def test_the_token_at_hand_counts_as_reported_beyond_the_top_20() -> None:
    reference = hand_made([(1, 0.6), (2, 0.3)])
    filler = [(2000 + i, 0.01) for i in range(19)]
    candidate = hand_made([(1, 0.5), *filler], other=(2, 0.002))
    expected = 0.6 * np.log(0.6 / 0.5) + 0.3 * np.log(0.3 / 0.002) + 0.1 * np.log(0.1 / 0.498)
    assert kl_lower_bounds(reference, candidate)[0] == pytest.approx(expected, abs=1e-6)


def test_equal_scores_have_no_divergence() -> None:
    logs = log_softmax(np.random.default_rng(1).standard_normal((50, 300)) * 3)
    same = scores(logs, np.zeros(50, dtype=np.int64))
    assert compare(same, same).kl_nats == pytest.approx(0.0, abs=1e-12)
    assert compare(same, same).perplexity_increase_ratio == 0.0


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.1, 12.0), st.floats(0.0, 12.0))
def test_the_estimate_never_exceeds_the_true_divergence(seed: int, scale: float, noise: float) -> None:
    generator = np.random.default_rng(seed)
    logits = scale * generator.standard_normal((8, 80))
    p = log_softmax(logits)
    q = log_softmax(logits + noise * generator.standard_normal((8, 80)))
    actual = generator.integers(0, 80, 8)
    true = (np.exp(p) * (p - q)).sum(axis=1)
    assert (kl_lower_bounds(scores(p, actual), scores(q, actual)) <= true + 1e-9).all()


def test_garbage_scores_high() -> None:
    generator = np.random.default_rng(2)
    p = log_softmax(4 * generator.standard_normal((50, 1000)))
    q = log_softmax(4 * generator.standard_normal((50, 1000)))
    actual = np.zeros(50, dtype=np.int64)
    assert compare(scores(p, actual), scores(q, actual)).kl_nats > 1.0


async def read(script: FakeScript, pieces: tuple[str, ...]) -> PromptScores:
    engine = FakeEngine(script, {})
    endpoint = await engine.start()
    try:
        async with aiohttp.ClientSession() as http:
            return await quality.read_scores(http, endpoint, pieces)
    finally:
        await engine.stop()


async def test_over_http_the_figures_are_those_of_the_engines_distribution() -> None:
    pieces = calibration_pieces(1)
    reference, candidate = await read(FakeScript(), pieces), await read(FakeScript(drift=0.5), pieces)
    ids = fake_tokens(pieces[0])
    p = np.array([fake_distribution(i, 0.0) for i in ids[:-1]])
    q = np.array([fake_distribution(i, 0.5) for i in ids[:-1]])
    actual = np.array(ids[1:])
    figures = compare(reference, candidate)
    oracle = compare(scores(p, actual), scores(q, actual))
    assert figures.kl_nats == pytest.approx(oracle.kl_nats, rel=1e-9)
    assert figures.perplexity == pytest.approx(np.exp(-q[np.arange(len(actual)), actual].mean()))
    assert 0 < figures.kl_nats <= (np.exp(p) * (p - q)).sum(axis=1).mean()


async def test_a_stored_reference_is_read_back_and_belongs_to_its_model(tmp_path: Path) -> None:
    made = await read(FakeScript(), calibration_pieces(1))
    quality.store_reference(tmp_path, KEY, made)
    stored = quality.load_reference(tmp_path, KEY)
    assert stored is not None
    assert (stored.top_ids == made.top_ids).all()
    assert quality.load_reference(tmp_path, ReferenceKey("other", "0.1.0", "cpu", 1)) is None


def test_a_damaged_reference_is_none(tmp_path: Path) -> None:
    (tmp_path / KEY.file_name).write_bytes(b"PK\x03\x04 not a zip")
    assert quality.load_reference(tmp_path, KEY) is None


def test_another_tokenization_is_an_error() -> None:
    logs = log_softmax(np.random.default_rng(1).standard_normal((5, 50)))
    actual = np.zeros(5, dtype=np.int64)
    with pytest.raises(EngineCallError, match="tokenize"):
        compare(scores(logs, actual), scores(logs[:4], actual[:4]))
