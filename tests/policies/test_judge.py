"""The judge: right on clear cases, silent on missing data, and wrong no more often than it says."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from trimtab.engine.contract import RequestOutcome, RequestRecord
from trimtab.policies.judge import CheckResult, Decision, Look, judge
from trimtab.policies.manifest import Rollout
from trimtab.policies.stats.confidence_sequence import mean_interval
from trimtab.policies.stats.error_split import log_e_value

ROLLOUT = Rollout.model_validate(
    {
        "steps": [{"weight": 25, "detect": "50%"}, {"weight": 100}],
        "judge": {
            "confidence": 0.95,
            "margin": {"ttft": "50%", "tpot": "30%"},
            "window": "10s",
            "settle": "5s",
            "minRequests": 20,
            "maxImbalance": "40%",
        },
    }
)


def records(
    rng: random.Random, *, num: int, slow: float = 1.0, failed: int = 0, span_s: float = 100.0
) -> list[RequestRecord]:
    made = []
    for index in range(num):
        tpot_s = 0.03 * slow * rng.lognormvariate(0, 0.2)
        ttft_s = 0.2 * rng.lognormvariate(0, 0.3)
        made.append(
            RequestRecord(
                sequence=index,
                request_id=str(index),
                arrival_unix_s=0.0,
                finished_unix_s=1000 + (index + 0.5) * span_s / num,
                outcome=RequestOutcome.FAILED if index < failed else RequestOutcome.SUCCEEDED,
                prompt_tokens=100,
                output_tokens=50,
                queue_s=0.0,
                ttft_s=ttft_s,
                tpot_s=tpot_s,
                max_itl_s=tpot_s,
                duration_s=ttft_s + 49 * tpot_s,
                mean_batch_size=1.0,
                mean_step_s=tpot_s,
            )
        )
    return made


def look(canary: list[RequestRecord] | None, baseline: list[RequestRecord] | None, until_s: float = 1100.0) -> Look:
    return Look(0, 1000.0, until_s, canary, baseline)


def test_equal_arms_are_promoted() -> None:
    rng = random.Random(1)
    verdict = judge(ROLLOUT, look(records(rng, num=100), records(rng, num=100)))
    assert verdict.decision is Decision.PROMOTE
    assert {c.metric for c in verdict.checks} == {"ttft", "tpot", "errors"}


@pytest.mark.parametrize(
    ("num", "failed", "baseline_failed", "decision"),
    [
        (30, 4, 0, Decision.CONTINUE),  # too few to show harm, and no reason to trust it
        (100, 2, 0, Decision.CONTINUE),
        (100, 1, 0, Decision.PROMOTE),  # within the margin of 1 %
        (100, 3, 3, Decision.PROMOTE),
        (100, 0, 4, Decision.PROMOTE),
        (100, 20, 0, Decision.ROLLBACK),
    ],
)
def test_more_errors_than_the_margin_never_pass(
    num: int, failed: int, baseline_failed: int, decision: Decision
) -> None:
    rng = random.Random(4)
    arms = records(rng, num=num, failed=failed), records(rng, num=num, failed=baseline_failed)
    verdict = judge(ROLLOUT, look(*arms))
    assert verdict.decision is decision
    assert f"errors: canary {failed} of {num}" in verdict.sentence


def test_a_slow_canary_is_rolled_back_with_numbers() -> None:
    rng = random.Random(2)
    verdict = judge(ROLLOUT, look(records(rng, num=60, slow=3.0), records(rng, num=60)))
    assert verdict.decision is Decision.ROLLBACK
    tpot = next(c for c in verdict.checks if c.metric == "tpot")
    assert tpot.result is CheckResult.FAIL
    assert tpot.ratio == pytest.approx(3.0, rel=0.15)
    assert "TPOT of the canary is" in verdict.sentence
    assert "60 and 60 requests" in verdict.sentence


def test_a_failing_canary_is_rolled_back() -> None:
    rng = random.Random(3)
    verdict = judge(ROLLOUT, look(records(rng, num=60, failed=20), records(rng, num=60)))
    assert verdict.decision is Decision.ROLLBACK
    assert "canary 20 of 60" in verdict.sentence


@pytest.mark.parametrize(("canary", "baseline"), [(None, 5), (5, None)])
def test_unreadable_records_never_pass(canary: int | None, baseline: int | None) -> None:
    rng = random.Random(4)
    arms = [records(rng, num=n) if n else None for n in (canary, baseline)]
    verdict = judge(ROLLOUT, look(*arms))
    assert verdict.decision is Decision.INCONCLUSIVE
    assert verdict.checks[0].result is CheckResult.ERROR


def test_no_requests_and_too_few_requests_are_inconclusive() -> None:
    rng = random.Random(5)
    for canary, baseline in ((0, 0), (0, 100), (100, 0), (19, 100)):
        verdict = judge(ROLLOUT, look(records(rng, num=canary), records(rng, num=baseline)))
        assert verdict.decision is Decision.INCONCLUSIVE
        assert all(c.result is not CheckResult.PASS for c in verdict.checks)


def test_a_figure_that_no_record_has_never_passes() -> None:
    rng = random.Random(6)
    canary = [replace(r, tpot_s=None) for r in records(rng, num=100)]
    verdict = judge(ROLLOUT, look(canary, records(rng, num=100)))
    assert verdict.decision is Decision.CONTINUE
    assert next(c for c in verdict.checks if c.metric == "tpot").result is CheckResult.INCONCLUSIVE


def test_harm_is_not_judged_from_too_few_requests_but_is_under_unequal_load() -> None:
    rng = random.Random(11)
    few = judge(ROLLOUT, look(records(rng, num=19, slow=5.0), records(rng, num=100)))
    assert few.decision is Decision.INCONCLUSIVE
    unequal = judge(ROLLOUT, look(records(rng, num=40, slow=5.0), records(rng, num=100)))
    assert unequal.decision is Decision.ROLLBACK


def test_arms_with_unequal_load_are_not_compared() -> None:
    rng = random.Random(7)
    verdict = judge(ROLLOUT, look(records(rng, num=50), records(rng, num=100)))
    assert verdict.decision is Decision.INCONCLUSIVE
    assert "tokens differ by 50%" in verdict.sentence


def test_an_incomplete_window_and_cancelled_requests_do_not_count() -> None:
    rng = random.Random(8)
    cancelled = [replace(r, outcome=RequestOutcome.CANCELLED) for r in records(rng, num=100)]
    assert judge(ROLLOUT, look(cancelled, records(rng, num=100))).num_canary == 0
    assert judge(ROLLOUT, look(records(rng, num=100), records(rng, num=100), 1019.9)).num_windows == 1


def test_a_shock_to_both_arms_cancels() -> None:
    rng = random.Random(9)
    arms = []
    for _ in range(2):
        made = records(rng, num=200)
        arms.append(
            [replace(r, tpot_s=(r.tpot_s or 0) * (5 if 1030 < r.finished_unix_s < 1060 else 1)) for r in made]
        )
    assert judge(ROLLOUT, look(*arms)).decision is Decision.PROMOTE


def test_looking_after_every_window_keeps_the_error_rate() -> None:
    """A thousand A/A rollouts, a look a window: the interval misses zero at any look in at most alpha of them."""
    rng = np.random.default_rng(1)
    alpha, runs, horizon = 0.05, 1000, 60
    wrong = 0
    for _ in range(runs):
        x = rng.normal(0, 1, horizon).tolist()
        if any(not i.low <= 0 <= i.high for i in (mean_interval(x[:n], alpha) for n in range(2, horizon + 1))):
            wrong += 1
    # 5 % and three standard errors; a t-test looked at as often errs in about 40 %.
    assert wrong / runs <= alpha + 3 * math.sqrt(alpha * (1 - alpha) / runs)
    peeking = sum(
        any(stats.ttest_1samp(x[:n], 0).pvalue < alpha for n in range(5, horizon, 5))
        for x in rng.normal(0, 1, (200, horizon))
    )
    assert peeking / 200 > 2 * alpha


def test_the_interval_shrinks_to_the_mean() -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(0.3, 1, 5000).tolist()
    interval = mean_interval(x, 0.05)
    assert interval.low < 0.3 < interval.high
    # Always-valid costs less than a factor of two over the fixed-size interval here.
    assert interval.high - interval.low < 2 * 2 * 1.96 / math.sqrt(5000)


def test_the_error_e_value_is_a_martingale_under_the_null() -> None:
    """Its expectation under any fixed number of errors is 1 (Ville's inequality then bounds false alarms)."""
    for share in (0.5, 0.1):
        for n in (1, 7, 40):
            expected = sum(
                stats.binom.pmf(s, n, share) * math.exp(log_e_value(s, n - s, share)) for s in range(n + 1)
            )
            assert expected == pytest.approx(1.0)
