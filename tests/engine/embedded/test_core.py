"""The engine core on a tiny real model: one text for one request, whoever else is there."""

import random
from typing import Any

import pytest

from trimtab.engine.contract import RequestOutcome
from trimtab.engine.embedded.generation import FinishReason
from trimtab.engine.embedded.inject import Injection
from trimtab.errors import RequestError

Prompts = list[list[int]]


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    rng = random.Random(7)
    return [[rng.randrange(3, 500) for _ in range(rng.randint(1, 70))] for _ in range(12)]


def sampled(seed: int, **more: Any) -> dict[str, Any]:
    return {"max_output_tokens": 24, "temperature": 0.9, "top_p": 0.95, "seed": seed, "ignore_eos": True} | more


def texts_alone(tiny_driver: Any, prompts: Prompts, **more: Any) -> list[list[int]]:
    alone = []
    for seed, prompt in enumerate(prompts):
        driver = tiny_driver()
        heard = driver.submit(prompt, **sampled(seed, **more))
        driver.run()
        alone.append(heard.token_ids)
    return alone


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    "knobs",
    [
        {"max_num_seqs": 16},
        {"max_num_seqs": 3, "max_num_batched_tokens": 16, "prefill_chunk_tokens": 16, "block_size": 8},
        {"speculative_method": "ngram", "speculative_k": 5},
        {"speculative_method": "ngram", "speculative_k": 7, "max_num_batched_tokens": 20, "max_num_seqs": 9},
    ],
)
def test_a_text_is_the_same_alone_in_a_crowd_chunked_and_with_drafts(
    tiny_driver: Any, prompts: Prompts, knobs: dict[str, Any], temperature: float
) -> None:
    alone = texts_alone(tiny_driver, prompts, temperature=temperature)
    driver = tiny_driver(**knobs)
    heard = [driver.submit(p, **sampled(i, temperature=temperature)) for i, p in enumerate(prompts)]
    driver.run()
    assert [h.token_ids for h in heard] == alone
    assert driver.core.scheduler.blocks.owned_units == 0


def test_a_stop_string_ends_the_text_before_it_with_and_without_drafts(tiny_driver: Any, prompts: Prompts) -> None:
    driver = tiny_driver()
    whole = driver.submit(prompts[0], **sampled(0))
    driver.run()
    stop = whole.text[len(whole.text) // 2 :][:3]
    expected = whole.text[: whole.text.index(stop)]
    for method in ("off", "ngram"):
        driver = tiny_driver(speculative_method=method)
        heard = driver.submit(prompts[0], **sampled(0, stops=(stop,)))
        driver.run()
        assert (heard.text, heard.finish) == (expected, FinishReason.STOP)
        assert heard.token_ids == whole.token_ids[: len(heard.token_ids)]


def test_logprobs_cover_every_token_and_do_not_depend_on_drafts(tiny_driver: Any, prompts: Prompts) -> None:
    seen = []
    for method in ("off", "ngram"):
        driver = tiny_driver(speculative_method=method)
        heard = driver.submit(prompts[1], **sampled(3, num_logprobs=5, max_output_tokens=40))
        driver.run()
        scores = [s for e in heard.emissions if e.scores is not None for s in e.scores.logprobs.tolist()]
        assert len(scores) == len(heard.token_ids) == 40
        seen.append(scores)
    assert seen[0] == pytest.approx(seen[1], abs=1e-4)


def test_prompt_scores_are_whole_whatever_the_chunks_and_preemptions(tiny_driver: Any, prompts: Prompts) -> None:
    prompt = [t for p in prompts for t in p][:300]
    seen = []
    for knobs in ({"max_num_batched_tokens": 512, "prefill_chunk_tokens": 512}, {"max_num_batched_tokens": 16}):
        driver = tiny_driver(**knobs)
        heard = driver.submit(prompt, max_output_tokens=0, num_prompt_logprobs=20)
        driver.run()
        (emission,) = heard.emissions
        assert (emission.finish, emission.token_ids) == (FinishReason.LENGTH, ())
        assert emission.prompt_scores is not None
        assert emission.prompt_scores.token_ids.tolist() == prompt[1:]
        seen.append(emission.prompt_scores.logprobs.tolist())
    assert seen[0] == pytest.approx(seen[1], abs=1e-4)


def test_end_of_text_ends_the_output_unless_ignored(tiny_driver: Any, tiny_loaded: Any, prompts: Prompts) -> None:
    eos = min(tiny_loaded.tokenizer.eos_ids)
    driver = tiny_driver()
    seeds = range(200)
    heard = [driver.submit(prompts[0], **sampled(s, ignore_eos=False, temperature=2.0, top_p=1.0)) for s in seeds]
    driver.run()
    stopped = [h for h in heard if h.finish is FinishReason.STOP]
    assert stopped
    assert all(h.token_ids[-1] in tiny_loaded.tokenizer.eos_ids for h in stopped)
    assert all(eos not in h.token_ids[:-1] for h in heard)
    driver = tiny_driver()
    kept = driver.submit(prompts[0], **sampled(seeds[heard.index(stopped[0])], temperature=2.0, top_p=1.0))
    driver.run()
    assert len(kept.token_ids) == 24


def test_cancelling_frees_the_blocks_and_leaves_the_others_alone(tiny_driver: Any, prompts: Prompts) -> None:
    alone = texts_alone(tiny_driver, prompts[:2])
    driver = tiny_driver()
    heard = [driver.submit(p, **sampled(i)) for i, p in enumerate(prompts[:2])]
    gone = driver.submit(prompts[2], **sampled(2))
    waiting = driver.submit(prompts[3], **sampled(3))
    driver.core.cancel(waiting.request)
    for _ in range(5):
        driver.core.step()
    driver.core.cancel(gone.request)
    driver.core.cancel(gone.request)
    driver.run()
    assert [h.token_ids for h in heard] == alone
    assert driver.core.scheduler.blocks.owned_units == 0
    outcomes = [r.outcome for r in driver.telemetry.records.since(0).records]
    assert outcomes.count(RequestOutcome.CANCELLED) == 2


def test_a_step_that_raises_fails_its_requests_and_the_engine_goes_on(
    tiny_driver: Any, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tiny_driver(max_num_seqs=1)
    failing, waiting = driver.submit(prompts[0], **sampled(0)), driver.submit(prompts[1], **sampled(1))
    driver.core.step()
    with monkeypatch.context() as patched:
        patched.setattr(driver.core._runner, "run", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            driver.core.step()
    driver.core.fail_step("division")
    assert (failing.finish, str(failing.emissions[-1].error)) == (FinishReason.ERROR, "division")
    driver.run()
    assert waiting.token_ids == texts_alone(tiny_driver, prompts[:2])[1]
    assert driver.core.scheduler.blocks.owned_units == 0


def test_what_can_never_fit_is_refused_at_once(tiny_driver: Any) -> None:
    driver = tiny_driver()
    with pytest.raises(RequestError, match="never fit"):
        driver.submit([1] * 10, max_output_tokens=driver.core.capacity_tokens)
    assert not driver.core.has_work


def test_records_and_metrics_tell_what_happened(tiny_driver: Any, prompts: Prompts) -> None:
    driver = tiny_driver()
    driver.submit(prompts[0], **sampled(0))
    driver.submit(prompts[1], **sampled(1))
    driver.run()
    records = driver.telemetry.records.since(0).records
    assert [r.output_tokens for r in records] == [24, 24]
    assert all(r.mean_batch_size == 2.0 for r in records)
    assert all(r.tpot_s and r.ttft_s and r.max_itl_s and r.mean_step_s for r in records)
    text = driver.telemetry.metrics.render().decode()
    assert "trimtab_engine_output_tokens_total 48.0" in text
    assert 'trimtab_engine_requests_total{outcome="succeeded"} 2.0' in text
    assert "trimtab_engine_running_requests 0.0" in text


def test_injected_slowness_multiplies_decode_steps_only(tiny_loaded: Any, tiny_driver: Any, prompts: Prompts) -> None:
    slept: list[float] = []
    driver = tiny_driver(Injection.parse("slow_decode=3"))
    object.__setattr__(driver.core._clock, "sleep", slept.append)
    driver.submit(prompts[5], **sampled(0, max_output_tokens=4))
    driver.core.step()
    assert slept == []
    driver.run()
    assert len(slept) == 3
    assert min(slept) > 0
