"""Workloads: the same seed gives the same requests, the clock scales, splits are disjoint, bad traces say where."""

import itertools
import json
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from trimtab.errors import WorkloadError
from trimtab.experiments.workload.synthetic import Arrivals, LogNormalTokens, SyntheticWorkload, prompt_text
from trimtab.experiments.workload.trace import read_trace


def synthetic(process: str = "poisson", cv: float = 1.0, rate_per_s: float = 5.0, seed: int = 1) -> SyntheticWorkload:
    tokens = LogNormalTokens(64, 0.6, 256)
    return SyntheticWorkload(rate_per_s, Arrivals(process, cv), tokens, tokens, seed)


def test_a_seed_decides_every_request() -> None:
    assert synthetic().requests(20.0) == synthetic().requests(20.0)
    assert synthetic().requests(20.0) != synthetic(seed=2).requests(20.0)


@pytest.mark.parametrize(("process", "cv"), [("poisson", 1.0), ("constant", 0.0), ("gamma", 3.0), ("gamma", 0.5)])
def test_gaps_have_the_rate_and_the_variation_of_their_law(process: str, cv: float) -> None:
    times = [r.at_s for r in synthetic(process, cv or 1.0, 200.0).requests(60.0)]
    gaps = np.diff(times)
    assert np.mean(gaps) == pytest.approx(1 / 200, rel=0.1)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(cv, abs=0.25)


def test_an_unknown_arrival_process_lists_the_accepted_ones() -> None:
    with pytest.raises(WorkloadError, match="poisson, constant, gamma"):
        synthetic("weibull").requests(1.0)


def test_a_scaled_clock_keeps_the_requests() -> None:
    slow, fast = synthetic().requests(40.0), synthetic().at_rate(10.0).requests(20.0)
    assert [(r.prompt, r.output_tokens) for r in slow] == [(r.prompt, r.output_tokens) for r in fast]
    assert [r.at_s / 2 for r in slow] == pytest.approx([r.at_s for r in fast])


def test_lengths_are_log_normal_and_clipped() -> None:
    lengths = [r.output_tokens for r in synthetic(rate_per_s=100).requests(60.0)]
    assert np.median(lengths) == pytest.approx(64, rel=0.05)
    assert np.std(np.log(lengths)) == pytest.approx(0.6, abs=0.06)
    assert 1 <= min(lengths) <= max(lengths) == 256


def test_held_out_traffic_differs_from_the_searched_and_by_seed() -> None:
    prompts = [
        {r.prompt for r in w.requests(20.0)} for w in (synthetic(), synthetic().held_out(0), synthetic().held_out(1))
    ]
    assert not prompts[0] & prompts[1]
    assert not prompts[1] & prompts[2]


def test_calibration_text_and_prompt_text_share_no_paragraph() -> None:
    folder = resources.files("trimtab.experiments.texts")
    texts = [set((folder / name).read_text().splitlines()) for name in ("prompts.txt", "calibration.txt")]
    assert not texts[0] & texts[1]
    assert len(prompt_text()) > 200_000


def trace(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    return path


def rows(num: int, gap_s: float = 0.5) -> list[str]:
    return [json.dumps({"at_s": 7 + i * gap_s, "prompt": f"prompt {i}", "output_tokens": i + 1}) for i in range(num)]


def test_a_trace_keeps_its_rate_and_splits_into_disjoint_halves(tmp_path: Path) -> None:
    workload = read_trace(trace(tmp_path, *rows(40)), rate_per_s=None, seed=1)
    assert workload.rate_per_s == pytest.approx(2.0)
    kept = {r.prompt for r in workload.requests(100.0)}
    held = {r.prompt for r in workload.held_out(3).requests(100.0)}
    assert len(kept) == len(held) == 20
    assert not kept & held
    assert workload.content_known


def test_a_short_trace_goes_round(tmp_path: Path) -> None:
    planned = read_trace(trace(tmp_path, *rows(8)), rate_per_s=10.0, seed=1).requests(5.0)
    assert len(planned) == pytest.approx(50, abs=5)
    assert all(a.at_s <= b.at_s for a, b in itertools.pairwise(planned))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "trace.jsonl:2: not JSON"),
        ('{"at_s": 8, "prompt": "x"}', "trace.jsonl:2: found at_s, prompt; accepted: an object with"),
        ('{"at_s": 1, "prompt": "x", "output_tokens": 1}', "trace.jsonl:2: at_s 1 is before"),
        ('{"at_s": NaN, "prompt": "x", "output_tokens": 1}', "trace.jsonl:2: at_s nan"),
        ('{"at_s": 8, "prompt": "", "output_tokens": 1}', "trace.jsonl:2: prompt"),
        ('{"at_s": 8, "prompt": "x", "output_tokens": -1}', "trace.jsonl:2: output_tokens -1"),
        ("[1]", "trace.jsonl:2: found list"),
        ("[" * 100_000, "trace.jsonl:2: not JSON"),
        ('{"at_s": 8, "prompt": "\\ud800", "output_tokens": 1}', "trace.jsonl:2: not JSON"),
        (f'{{"at_s": {"9" * 400}, "prompt": "x", "output_tokens": 1}}', "trace.jsonl:2: at_s"),
        (f'{{"at_s": {"9" * 5000}, "prompt": "x", "output_tokens": 1}}', "trace.jsonl:2: not JSON"),
    ],
)
def test_a_malformed_row_is_one_error_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        read_trace(trace(tmp_path, rows(1)[0], line, *rows(5)), rate_per_s=None, seed=1)
    assert message in str(caught.value)


def test_a_clock_that_no_load_can_follow_is_refused(tmp_path: Path) -> None:
    lines = [f'{{"at_s": {i}e-9, "prompt": "x", "output_tokens": 1}}' for i in range(8)]
    with pytest.raises(WorkloadError, match="requests a second"):
        read_trace(trace(tmp_path, *lines), rate_per_s=None, seed=1)
    assert read_trace(trace(tmp_path, *lines), rate_per_s=2.0, seed=1).requests(5.0)


def test_a_missing_trace_is_a_workload_error(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl", rate_per_s=None, seed=1)
