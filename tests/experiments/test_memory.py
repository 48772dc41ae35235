"""The memory check refuses only what surely cannot fit."""

import pytest

from trimtab.engine.adapters.embedded import CATALOGUE
from trimtab.experiments.memory import ModelFacts, needed_bytes, why_it_cannot_fit

MIB = 2**20
MODEL = ModelFacts("smol", "digest", 93 * MIB, 134_515_008)


@pytest.mark.parametrize(("quantization", "bytes_each"), [("fp32", 4.0), ("bf16", 2.0), ("int8", 1.0), ("int4", 0.5)])
def test_weights_and_pool_are_counted(quantization: str, bytes_each: float) -> None:
    made = CATALOGUE.configuration({"quantization": quantization, "kv_cache_bytes": 64 * MIB})
    assert needed_bytes(made, MODEL) == pytest.approx(bytes_each * 134_515_008 + 264 * MIB, abs=1)


def test_what_cannot_fit_is_said_with_numbers() -> None:
    made = CATALOGUE.configuration({"kv_cache_bytes": 4096 * MIB})
    assert why_it_cannot_fit(made, MODEL, 2048 * MIB) == "needs at least 4553 MiB, and a replica has 2048 MiB"
    assert why_it_cannot_fit(made, MODEL, 8192 * MIB) is None


def test_without_a_parameter_count_the_file_gives_a_lower_bound() -> None:
    unknown = ModelFacts("x", "digest", 100 * MIB)
    made = CATALOGUE.configuration({"kv_cache_bytes": 64 * MIB})
    assert needed_bytes(made, unknown) == 314 * MIB
