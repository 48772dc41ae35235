"""Sampling: the right distribution, from numbers that depend on seed and position only."""

import math

import pytest
import torch

from trimtab.engine.embedded.sampling import Draw, SamplingParams, sample, uniform

NO_EOS: frozenset[int] = frozenset()


def test_temperature_zero_takes_the_likeliest() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    greedy = SamplingParams(4, temperature=0.0)
    assert sample(logits, [Draw(greedy, 1, 0), Draw(greedy, 1, 0)], NO_EOS) == [1, 0]


def test_frequencies_follow_the_softmax_at_the_temperature() -> None:
    logits, temperature, num_draws = torch.tensor([1.0, 0.0, -1.0, 2.0]), 0.7, 6000
    params = SamplingParams(num_draws, temperature=temperature, seed=5)
    counts = torch.zeros(4)
    for position in range(num_draws):
        counts[sample(logits[None], [Draw(params, position, position)], NO_EOS)[0]] += 1
    expected = torch.softmax(logits / temperature, dim=-1)
    # Five standard deviations of a binomial share.
    tolerance = 5 * (expected * (1 - expected) / num_draws).sqrt()
    assert ((counts / num_draws - expected).abs() < tolerance).all()


def test_the_smallest_temperature_is_greedy() -> None:
    logits = torch.tensor([[0.0, 30.0, 29.0, -5.0]])
    assert sample(logits, [Draw(SamplingParams(4, temperature=5e-324, top_p=0.9), 1, 0)], NO_EOS) == [1]


@pytest.mark.parametrize("vocab_size", [4, 5000])
def test_top_p_keeps_the_smallest_set_with_that_mass(vocab_size: int) -> None:
    logits = torch.full((vocab_size,), -20.0)
    logits[:3] = torch.tensor([0.5, 0.3, 0.2]).log()
    params = SamplingParams(1, temperature=1.0, top_p=0.6, seed=1)
    drawn = {sample(logits[None], [Draw(params, p, 0)], NO_EOS)[0] for p in range(300)}
    assert drawn == {0, 1}


def test_top_p_over_a_flat_distribution_needs_more_than_the_first_guess() -> None:
    logits = torch.zeros(2000)
    params = SamplingParams(1, temperature=1.0, top_p=0.9, seed=1)
    drawn = [sample(logits[None], [Draw(params, p, 0)], NO_EOS)[0] for p in range(400)]
    assert len(set(drawn)) > 300


def test_top_p_of_zero_takes_the_likeliest() -> None:
    logits = torch.tensor([[0.0, 0.1, 0.0]])
    draws = [Draw(SamplingParams(1, temperature=1.0, top_p=0.0), position, 0) for position in range(50)]
    assert {sample(logits, [draw], NO_EOS)[0] for draw in draws} == {1}


def test_a_draw_does_not_depend_on_the_rest_of_the_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 300, generator=generator)
    draws = [Draw(SamplingParams(9, temperature=0.9, top_p=0.8, seed=s), 10 + s, 3) for s in range(6)]
    together = sample(logits, draws, NO_EOS)
    assert together == [sample(logits[i : i + 1], [draws[i]], NO_EOS)[0] for i in range(6)]


def test_the_numbers_are_uniform_and_differ_by_seed_and_position() -> None:
    numbers = [uniform(seed, position) for seed in range(40) for position in range(40)]
    assert len(set(numbers)) == 1600
    assert abs(sum(numbers) / 1600 - 0.5) < 5 / math.sqrt(12 * 1600)
    assert uniform(-1, 3) == uniform(2**64 - 1, 3)


def test_no_end_of_text_before_min_tokens_and_the_logits_stay_unchanged() -> None:
    logits = torch.tensor([[9.0, 1.0, 0.0]])
    params = SamplingParams(4, temperature=0.0, min_output_tokens=2)
    assert sample(logits, [Draw(params, 5, 1)], frozenset({0})) == [1]
    assert sample(logits, [Draw(params, 6, 2)], frozenset({0})) == [0]
    assert logits[0, 0] == 9.0
