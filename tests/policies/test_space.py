"""The search space: conditions, canonical configurations, what lies outside, what an engine does not take."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.engine.adapters.embedded import CATALOGUE
from trimtab.engine.contract import ChangeCost, KnobValue
from trimtab.errors import KnobError
from trimtab.policies.manifest import Search
from trimtab.policies.space import SearchSpace, build_space

SPECULATION = {
    "speculative_k": {"low": 1, "high": 7, "when": {"speculative_method": ["ngram"]}},
    "speculative_method": ["off", "ngram"],
    "max_num_seqs": {"low": 4, "high": 64, "log": True},
}


def space(
    parts: Mapping[str, object], *, content_known: bool = True, base: Mapping[str, KnobValue] = {}
) -> SearchSpace:
    spec = Search.model_validate({"space": parts}).space
    return build_space(spec, CATALOGUE, CATALOGUE.configuration(base), content_known=content_known)


class Fixed:
    """Chooses what it was told, and notes what it was asked."""

    def __init__(self, **values: KnobValue) -> None:
        self.values, self.asked = values, list[str]()

    def suggest_int(self, name: str, low: int, high: int, *, log: bool = False) -> int:
        return int(self._take(name))

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float:
        return float(self._take(name))

    def suggest_categorical(self, name: str, choices: tuple[KnobValue, ...]) -> KnobValue:
        return self._take(name)

    def _take(self, name: str) -> KnobValue:
        self.asked.append(name)
        return self.values[name]


def test_a_condition_is_asked_before_what_depends_on_it_whatever_the_order_in_the_policy() -> None:
    chooser = Fixed(speculative_method="ngram", speculative_k=5, max_num_seqs=8)
    made = space(SPECULATION).suggest(chooser)
    assert chooser.asked.index("speculative_method") < chooser.asked.index("speculative_k")
    assert made["speculative_k"] == 5


def test_an_inactive_knob_is_not_asked_and_takes_the_base_value() -> None:
    chooser = Fixed(speculative_method="off", max_num_seqs=8)
    made = space(SPECULATION).suggest(chooser)
    assert "speculative_k" not in chooser.asked
    assert made["speculative_k"] == CATALOGUE.default()["speculative_k"]


@given(st.integers(1, 7), st.integers(1, 7))
def test_configurations_that_differ_only_in_inactive_knobs_are_one(first: int, second: int) -> None:
    searched = space(SPECULATION)
    off = [searched.canonical({"speculative_method": "off", "speculative_k": k}) for k in (first, second)]
    assert off[0] == off[1]


def test_parameters_lead_back_to_the_configuration_and_are_none_outside_the_space() -> None:
    searched = space(SPECULATION)
    made = searched.suggest(Fixed(speculative_method="ngram", speculative_k=2, max_num_seqs=9))
    parameters = searched.parameters(made)
    assert parameters == {"speculative_method": "ngram", "speculative_k": 2, "max_num_seqs": 9}
    assert searched.suggest(Fixed(**parameters)) == made
    assert searched.parameters(CATALOGUE.configuration({"max_num_seqs": 1})) is None
    assert searched.parameters(CATALOGUE.configuration({"quantization": "fp32"})) is None


def test_an_ordered_pair_is_mended() -> None:
    searched = space({"kv_high_watermark": {"low": 0.5, "high": 0.98}})
    made = searched.suggest(Fixed(kv_high_watermark=0.6))
    assert made["kv_low_watermark"] == made["kv_high_watermark"] == 0.6


def test_content_dependent_knobs_are_left_out_without_known_content() -> None:
    searched = space(SPECULATION, content_known=False)
    assert [d.name for d in searched.dimensions] == ["max_num_seqs"]
    assert set(searched.left_out) == {"speculative_method", "speculative_k"}


def test_knobs_are_found_by_what_their_change_costs() -> None:
    searched = space({"quantization": ["bf16", "int8"], "max_num_seqs": {"low": 4, "high": 64}})
    assert searched.names_with_cost(ChangeCost.LIVE) == ("max_num_seqs",)
    assert searched.names_with_cost(ChangeCost.RESTART, ChangeCost.REQUANTIZE) == ("quantization",)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"max_seqs": {"low": 1, "high": 2}}, "max_seqs.*accepted: quantization"),
        ({"max_num_seqs": {"low": 0, "high": 8}}, "max_num_seqs: 0.0 is out of range"),
        ({"quantization": ["bf16", "fp4"]}, "fp4.*accepted: fp32, bf16, int8, int4"),
        ({"quantization": {"low": 1, "high": 8}}, "quantization: a range was given"),
        (
            {
                "max_num_seqs": {"low": 1, "high": 8, "when": {"block_size": [16]}},
                "block_size": {"low": 8, "high": 16, "when": {"max_num_seqs": [4]}},
            },
            "circular",
        ),
    ],
)
def test_what_the_engine_does_not_take_is_refused(parts: Mapping[str, object], message: str) -> None:
    with pytest.raises(KnobError, match=message):
        space(parts)
