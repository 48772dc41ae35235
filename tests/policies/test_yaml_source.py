"""Manifests: what is accepted, and how each mistake is told."""

from contextlib import suppress
from importlib.resources import files
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.engine.adapters.embedded import CATALOGUE
from trimtab.errors import ManifestError
from trimtab.policies.manifest import TunedEngine, TuningPolicy
from trimtab.policies.yaml_source import parse_manifests

CATALOGUES = {"embedded": CATALOGUE}
CHAT = (files("trimtab.policies") / "presets/chat.yaml").read_text()
TARGET = """
apiVersion: trimtab.dev/v1alpha1
kind: TunedEngine
metadata: {name: smol}
spec:
  policy: chat
  model: smollm2-135m-instruct
  port: 8000
  resources: {cpus: 2, memory: 4GiB}
  configuration: {quantization: fp32, max_num_seqs: 1}
"""


def parse(text: str) -> list[TuningPolicy | TunedEngine]:
    return parse_manifests(text, "f.yaml", CATALOGUES)


def mistake(text: str) -> str:
    with pytest.raises(ManifestError) as caught:
        parse(text)
    return str(caught.value)


def changed(old: str, new: str) -> str:
    assert old in CHAT
    return CHAT.replace(old, new)


def line_of(text: str, part: str) -> int:
    return next(i for i, line in enumerate(text.splitlines(), 1) if part in line)


def test_the_preset_is_accepted_in_base_units() -> None:
    (policy,) = parse(CHAT)
    assert isinstance(policy, TuningPolicy)
    assert policy.spec.slo.tpot is not None
    assert policy.spec.slo.tpot.bounds() == {95: 0.06}
    assert policy.spec.slo.errorRate == 0.001
    assert policy.spec.search.budget.duration == 1800
    assert policy.spec.rollout.steps[0].detect == 0.5


def test_a_policy_survives_its_own_canonical_form() -> None:
    (policy,) = parse(CHAT)
    again = parse(yaml.safe_dump(policy.model_dump(mode="json", by_alias=True, exclude_none=True)))
    assert again == [policy]


def test_a_target_and_its_policy_in_one_file() -> None:
    policy, target = parse(CHAT + "---" + TARGET)
    assert isinstance(target, TunedEngine)
    assert target.spec.policy == policy.metadata.name
    assert target.spec.resources.memory == 4 * 1024**3


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("budget: {trials: 20", "budget: {trails: 20", ("search.budget.trails", "unknown key", "trials")),
        ("maxKL: 0.02", "maxKL: .inf", ("quality.maxKL", "finite")),
        ("tpot: {p95: 60ms}", "tpot: {p95: 60}", ("slo.tpot.p95", "60", "no unit", "60ms")),
        ("errorRate: 0.1%", "errorRate: 0.1", ("slo.errorRate", "0.1", "no unit", "10%")),
        ("quantization: [bf16, int8, int4]", "quantization: [bf16, fp8]", ("fp8", "fp32, bf16, int8, int4")),
        (
            "max_num_seqs: {low: 4, high: 64",
            "max_num_seqs: {low: 4, high: 1000",
            ("max_num_seqs", "1000", "1 to 256"),
        ),
        (
            "quantization:",
            "kv_cache_type: [int8]\n      quantization:",
            ("kv_cache_type", "accepted: quantization"),
        ),
        ("{maximize: goodput}", "{maximize: tokens_per_dollar}", ("tokens_per_dollar", "not built yet", "goodput")),
        ("from: synthetic", "from: live", ("workload", "accepted: synthetic, trace")),
        ("rate: 1/s", "rate: 1", ("workload.rate", "no unit", "2/s")),
        ('"0 3 * * *"', '"0 3 * *"', ("schedule", "0 3 * *", "five fields")),
        ("triggers: {", "triggers: {drift: {}, ", ("triggers.drift", "not built yet", "schedule")),
        ("{weight: 50, detect: 10%}", "{weight: 60, detect: 10%}", ("60", "up to 50")),
        ("{weight: 25, detect: 20%}", "{weight: 25}", ("25", "needs detect")),
        (", {weight: 100}]", "]", ("rise and end at 100",)),
        (
            "{weight: 5, detect: 50%}, {weight: 25, detect: 20%}, {weight: 50, detect: 10%}, {weight: 100}",
            "{weight: 100}",
            ("must come before 100",),
        ),
        (
            "budget: {trials",
            'window: "01:00-05:00"\n    budget: {trials',
            ("search.window", "not built yet", "budget"),
        ),
        ("kind: TuningPolicy", "kind: TunningPolicy", ("kind", "TunningPolicy", "TuningPolicy, TunedEngine")),
        ("trimtab.dev/v1alpha1", "trimtab.dev/v2", ("apiVersion", "trimtab.dev/v2", "trimtab.dev/v1alpha1")),
        ("prompts: none", "prompts: none\n    prompts: none", ("prompts", "given twice")),
        ("metadata: {name: chat}", "metadata: {name: Chat Room}", ("metadata.name", "Chat Room")),
        ("parallel: 1}", "parallel: 2}", ("search.budget.parallel", "2")),
    ],
)
def test_a_mistake_names_file_line_found_and_accepted(old: str, new: str, expected: tuple[str, ...]) -> None:
    text = changed(old, new)
    told = mistake(text)
    assert told.startswith("f.yaml:")
    for part in expected:
        assert part in told


def test_the_line_is_the_value_s_own() -> None:
    text = changed("tpot: {p95: 60ms}", "tpot:\n      p95: 60")
    assert mistake(text).startswith(f"f.yaml:{line_of(text, 'p95: 60')}: ")


def test_a_bare_off_is_explained() -> None:
    text = changed("quantization: [", "speculative_method: [off, ngram]\n      quantization: [")
    assert "quote it" in mistake(text)


def test_a_condition_names_a_knob_of_the_space() -> None:
    extra = "speculative_k: {low: 1, high: 7, when: {speculative_method: [ngram]}}\n      quantization: ["
    assert "speculative_method" in mistake(changed("quantization: [", extra))


def test_several_mistakes_are_told_at_once() -> None:
    text = changed("rate: 1/s", "rate: 1").replace("p95: 1s", "p95: 1")
    assert len(mistake(text).splitlines()) == 2


def test_a_target_s_configuration_is_checked() -> None:
    assert "max_num_seqs" in mistake(TARGET.replace("max_num_seqs: 1", "max_num_seqs: 0"))
    assert "kv_low_watermark" in mistake(TARGET.replace("max_num_seqs: 1", "kv_low_watermark: 0.99"))


@pytest.mark.parametrize(
    "text", ["", "# nothing", "[1, 2]", "a: [", "a: &x 1\nb: *x", "\t", "a: !!python/name:os.system x"]
)
def test_what_is_no_manifest_is_one_clear_error(text: str) -> None:
    assert mistake(text).startswith("f.yaml:")


@settings(deadline=None)
@given(st.text(max_size=200))
def test_no_text_crashes_the_parser(text: str) -> None:
    with pytest.raises(ManifestError):
        parse(text)


@settings(deadline=None)
@given(st.integers(0, len(CHAT)), st.text(max_size=6))
def test_no_damage_to_a_policy_crashes_the_parser(position: int, inserted: str) -> None:
    with suppress(ManifestError):
        parse(CHAT[:position] + inserted + CHAT[position:])


def test_examples_in_the_repository_are_accepted() -> None:
    root = Path(__file__).parents[2]
    for file in sorted((root / "examples").glob("*.yaml")):
        assert parse_manifests(file.read_text(), str(file), CATALOGUES)


@pytest.mark.parametrize("text", ["[" * 500_000, "{a: " * 100_000, "- " * 100_000])
def test_deep_nesting_is_refused_at_once(text: str) -> None:
    with pytest.raises(ManifestError, match=r"f\.yaml:1: nested deeper than 64 levels"):
        parse_manifests(text, "f.yaml", {"embedded": CATALOGUE})
