"""The engine core in a pool that is far too small, and with its knobs turned while it serves: nothing is lost."""

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trimtab.engine.adapters.embedded import CATALOGUE
from trimtab.engine.contract import ChangeCost, RequestOutcome
from trimtab.engine.embedded.generation import FinishReason, Queueing
from trimtab.errors import KnobError, OverloadedError

Prompts = list[list[int]]
NO_WATERMARKS = {"kv_high_watermark": 1.0, "kv_low_watermark": 1.0}


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    rng = random.Random(7)
    shared = [rng.randrange(3, 500) for _ in range(40)]
    alone = [[rng.randrange(3, 500) for _ in range(rng.randint(1, 70))] for _ in range(8)]
    return alone + [shared[: rng.randint(10, 40)] + alone[i] for i in range(4)]


def sampled(seed: int) -> dict[str, Any]:
    return {"max_output_tokens": 24, "temperature": 0.9, "top_p": 0.95, "seed": seed, "ignore_eos": True}


@pytest.fixture(scope="module")
def alone(make_driver: Any, tiny_loaded: Any, prompts: Prompts) -> list[list[int]]:
    """Each prompt's output when it has an engine to itself."""
    found = []
    for seed, prompt in enumerate(prompts):
        driver = make_driver(tiny_loaded, prefix_cache="off")
        heard = driver.submit(prompt, **sampled(seed))
        driver.run()
        found.append(heard.token_ids)
    return found


def shrink_pool(driver: Any, num_blocks: int) -> None:
    """Leaves ``num_blocks`` blocks usable: the smallest pool of the catalogue is too big to run short."""
    blocks = driver.core.scheduler.blocks
    blocks.set_usable_ratio(num_blocks / (blocks.capacity_tokens // blocks.block_size))


def metric(driver: Any, name: str) -> float:
    lines = driver.telemetry.metrics.render().decode().splitlines()
    return float(next(x for x in lines if x.startswith(name + " ")).split()[-1])


@pytest.mark.parametrize("prefix_cache", ["off", "on"])
@pytest.mark.parametrize("action", ["recompute", "swap"])
@pytest.mark.parametrize("watermarks", [NO_WATERMARKS, {"kv_high_watermark": 0.7, "kv_low_watermark": 0.4}])
def test_preemption_changes_no_text(
    tiny_driver: Any, prompts: Prompts, alone: Any, watermarks: dict[str, float], action: str, prefix_cache: str
) -> None:
    driver = tiny_driver(
        **watermarks, kv_pressure_action=action, prefix_cache=prefix_cache, speculative_method="ngram"
    )
    shrink_pool(driver, num_blocks=12)
    for _ in range(10):  # short outputs teach the admission to expect no more
        driver.submit([1], max_output_tokens=1)
    driver.run()
    heard = [driver.submit(p, **sampled(i)) for i, p in enumerate(prompts)]
    driver.run()
    assert [h.token_ids for h in heard] == alone
    assert metric(driver, "trimtab_engine_preemptions_total") > 0
    assert (metric(driver, "trimtab_engine_swapped_sequences_total") > 0) == (action == "swap")
    assert driver.core.scheduler.blocks.owned_units == 0


def test_compression_keeps_everybody_running_and_texts_of_their_length(
    tiny_driver: Any, prompts: Prompts, alone: Any
) -> None:
    driver = tiny_driver(kv_pressure_action="compress", kv_high_watermark=0.5, kv_low_watermark=0.2)
    shrink_pool(driver, num_blocks=30)
    heard = [driver.submit(p, **sampled(i)) for i, p in enumerate(prompts)]
    driver.run()
    assert metric(driver, "trimtab_engine_compressed_blocks_total") > 0
    assert [len(h.token_ids) for h in heard] == [24] * len(prompts)
    same = sum(h.token_ids[:4] == expected[:4] for h, expected in zip(heard, alone, strict=True))
    assert same >= len(prompts) // 2  # int8 keys and values move few of the first choices
    assert driver.core.scheduler.blocks.owned_units == 0


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_compressed_cache_gives_the_same_texts_in_a_crowd_but_for_roundings(
    tiny_driver: Any, prompts: Prompts, dtype: str
) -> None:
    texts = []
    for knobs in ({"max_num_seqs": 1}, {"max_num_seqs": 12, "max_num_batched_tokens": 64}):
        driver = tiny_driver(kv_cache_dtype=dtype, **knobs)
        heard = [driver.submit(p, **sampled(i)) for i, p in enumerate(prompts)]
        driver.run()
        texts.append([h.token_ids for h in heard])
    assert [len(t) for t in texts[0] + texts[1]] == [24] * 2 * len(prompts)
    # Where the last bits of a product depend on its number of rows, a value on the edge is rounded to its neighbour.
    same = sum(a == b for a, b in zip(*texts, strict=True))
    assert same >= len(prompts) - 2


def test_a_compressed_cache_holds_more_tokens(tiny_driver: Any) -> None:
    capacity = {d: tiny_driver(kv_cache_dtype=d).core.capacity_tokens for d in ("auto", "int8", "int4")}
    assert capacity["int8"] > 3.4 * capacity["auto"]  # of fp32, less the scales
    assert capacity["int4"] > 1.5 * capacity["int8"]


def test_a_cached_prefix_changes_no_text_and_is_counted(tiny_driver: Any, prompts: Prompts, alone: Any) -> None:
    driver = tiny_driver(prefix_cache="on")
    for _ in range(2):
        heard = [driver.submit(p, **sampled(i)) for i, p in enumerate(prompts)]
        driver.run()
        assert [h.token_ids for h in heard] == alone
    assert all(
        h.emissions[-1].num_cached_tokens >= (len(p) - 1) // 16 * 16 for h, p in zip(heard, prompts, strict=True)
    )
    assert metric(driver, "trimtab_engine_prefix_hit_tokens_total") > 0
    cold = driver.submit(prompts[0], **sampled(0), queueing=Queueing(cache_salt="another tenant"))
    driver.run()
    assert cold.emissions[-1].num_cached_tokens == 0
    assert cold.token_ids == alone[0]


def live_values(draw: st.DrawFn) -> dict[str, Any]:
    """Some of the live knobs at random values; compression and injected refusals aside, no text may change."""
    values: dict[str, Any] = {}
    for knob in CATALOGUE.knobs:
        if knob.change_cost is not ChangeCost.LIVE or knob.name == "max_queue_ms" or draw(st.booleans()):
            continue
        if hasattr(knob, "choices"):
            values[knob.name] = draw(st.sampled_from([c for c in knob.choices if c != "compress"]))
        elif isinstance(knob.default, int):
            # Near the low end, where limits bite.
            values[knob.name] = draw(st.integers(knob.low, min(knob.high, 50 * knob.low)))
        else:
            values[knob.name] = draw(st.floats(knob.low, knob.high))
    high = values.get("kv_high_watermark", 1.0)
    return values | {"kv_high_watermark": high, "kv_low_watermark": min(high, values.get("kv_low_watermark", high))}


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_turning_any_live_knob_under_load_loses_nothing_and_changes_no_text(
    tiny_driver: Any, prompts: Prompts, alone: Any, data: st.DataObject
) -> None:
    driver = tiny_driver(**NO_WATERMARKS)
    shrink_pool(driver, data.draw(st.integers(10, 60)))
    heard = [driver.submit(p, **sampled(i)) for i, p in enumerate(prompts)]
    num_steps = 0
    while driver.core.has_work:
        if num_steps % 4 == 0:
            values = data.draw(st.composite(live_values)()) if num_steps < 60 else {}
            driver.core.change(CATALOGUE.configuration(values, base=driver.core.configuration))
            if data.draw(st.booleans()):
                shrink_pool(driver, data.draw(st.integers(10, 60)))
        driver.core.step()
        num_steps += 1
        assert num_steps < 20_000
    assert [h.token_ids for h in heard] == alone
    assert driver.core.scheduler.blocks.owned_units == 0


def test_a_knob_that_is_not_live_is_refused(tiny_driver: Any) -> None:
    driver = tiny_driver()
    with pytest.raises(KnobError, match="block_size"):
        driver.core.change(CATALOGUE.configuration({"block_size": 32}, base=driver.core.configuration))


def test_a_request_that_waits_too_long_is_refused_and_recorded(tiny_driver: Any, prompts: Prompts) -> None:
    driver = tiny_driver(max_num_seqs=1)
    first = driver.submit(prompts[0], **sampled(0))
    late = driver.submit(prompts[1], **sampled(1), queueing=Queueing(deadline_ms=1))
    driver.run()
    assert first.finish is FinishReason.LENGTH
    assert isinstance(late.emissions[-1].error, OverloadedError)
    assert "its deadline passed" in str(late.emissions[-1].error)
    outcomes = [r.outcome for r in driver.telemetry.records.since(0).records]
    assert sorted(outcomes) == [RequestOutcome.REFUSED, RequestOutcome.SUCCEEDED]


@pytest.mark.parametrize("adaptive", ["off", "on"])
def test_drafts_change_no_text_whether_their_number_adapts_or_not(
    tiny_driver: Any, prompts: Prompts, adaptive: str
) -> None:
    texts = []
    for knobs in ({}, {"speculative_method": "ngram", "speculative_k": 7, "speculative_adaptive": adaptive}):
        driver = tiny_driver(**knobs)
        heard = [driver.submit(p, max_output_tokens=60, ignore_eos=True) for p in prompts]  # greedy texts repeat
        driver.run()
        texts.append([h.token_ids for h in heard])
    assert texts[0] == texts[1]
    assert metric(driver, "trimtab_engine_draft_tokens_total") > 0
