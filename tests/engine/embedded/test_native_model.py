"""The native model against the float32 one: close in what it predicts, and equal in how it is driven."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trimtab.engine.embedded.batch import StepBatch
from trimtab.engine.embedded.config import ModelConfig
from trimtab.engine.embedded.kv.layout import KVLayout
from trimtab.engine.embedded.kv.pool import KVPool
from trimtab.engine.embedded.kv.storage import KVStorage
from trimtab.engine.embedded.loader import LoadedModel, load_model
from trimtab.engine.embedded.model import Model
from trimtab.engine.embedded.native_model import NativeKernels
from trimtab.kernels.attention import Span
from trimtab.kernels.cpu.build import supported_levels
from trimtab.kernels.cpu.library import Library
from trimtab.kernels.kv_cache import BlockSlot, KVType


@pytest.fixture(scope="module")
def kernels(kernel_cache: Path) -> NativeKernels:
    return NativeKernels(Library(supported_levels()[0], kernel_cache), 2)


def logits(model: Model, token_ids: list[int]) -> Tensor:
    """All rows' logits of one prefill."""
    layout = KVLayout.of(model.config, 16, model.kv_dtype, "auto")
    num_blocks = -(-len(token_ids) // 16)
    positions = np.arange(len(token_ids), dtype=np.int32)
    table = tuple(BlockSlot(KVType.FULL, n) for n in range(num_blocks))
    spans = (Span(0, len(token_ids), len(token_ids), table),)
    batch = StepBatch(np.array(token_ids, np.int32), positions, positions, spans, positions, True)
    output = model.forward(batch, KVPool(layout, KVStorage.touched(layout, num_blocks)))
    assert output.logits is not None
    assert output.most_likely == output.logits.argmax(dim=-1).tolist()
    return output.logits


@pytest.mark.model
@pytest.mark.parametrize(("quantization", "most_nats"), [("bf16", 0.0005), ("int8", 0.0075), ("int4", 0.005)])
def test_predictions_stay_near_those_of_float32(
    kernels: NativeKernels, model_path: Path, quantization: str, most_nats: float
) -> None:
    exact, native = load_model(model_path, "fp32"), load_model(model_path, quantization, kernels)
    text = (resources.files("trimtab.experiments.texts") / "calibration.txt").read_text(encoding="utf-8")
    token_ids = exact.tokenizer.encode(text, parse_special=False)[:512]
    expected, found = (torch.log_softmax(logits(x.model, token_ids).double(), -1) for x in (exact, native))
    divergence = float((expected.exp() * (expected - found)).sum(dim=-1).mean())
    print(f"{quantization}: KL {divergence:.5f} nats over {len(token_ids)} predictions")
    assert native.model.kernels == kernels.library.level.name
    assert 0 < divergence < most_nats


def test_what_the_native_kernels_cannot_run_runs_on_torch(kernels: NativeKernels, tiny_model_dir: Path) -> None:
    assert load_model(tiny_model_dir, "fp32", kernels).model.kernels == "torch"
    assert load_model(tiny_model_dir, "int8", kernels).model.kernels == kernels.library.level.name


def test_the_same_text_under_pressure_and_speculation(
    kernels: NativeKernels, tiny_model_dir: Path, make_driver: Any
) -> None:
    loaded = load_model(tiny_model_dir, "int4", kernels)
    prompts = [[(7 * i + j % 50) % 512 for j in range(150 + 12 * i)] for i in range(12)]
    plain = _texts(make_driver(loaded, quantization="int4"), prompts)
    pressure = {"kv_usable_ratio": 0.05, "kv_pressure_action": "swap", "kv_swap_bytes": 2**24}
    driver = make_driver(loaded, quantization="int4", speculative_method="ngram", **pressure)
    assert _texts(driver, prompts) == plain
    rendered = driver.telemetry.metrics.render().decode().splitlines()
    for counter in ("swapped_sequences", "draft_tokens"):
        value = next(x for x in rendered if x.startswith(f"trimtab_engine_{counter}_total "))
        assert float(value.split()[-1]) > 0, value


def _texts(driver: Any, prompts: list[list[int]]) -> list[list[int]]:
    heard = [driver.submit(p, max_output_tokens=100, ignore_eos=True) for p in prompts]
    driver.run()
    return [h.token_ids for h in heard]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_who_shares_the_batch_does_not_matter_to_a_text(
    kernels: NativeKernels, tiny_model_dir: Path, make_driver: Any, temperature: float
) -> None:
    loaded: LoadedModel = load_model(tiny_model_dir, "int8", kernels)
    config: ModelConfig = loaded.model.config
    prompts = [[(11 * i + j) % config.vocab_size for j in range(5 + 30 * i)] for i in range(5)]
    driver = make_driver(loaded, quantization="int8")
    alone = []
    for prompt in prompts:
        heard = driver.submit(prompt, max_output_tokens=16, ignore_eos=True, temperature=temperature, seed=3)
        driver.run()
        alone.append(heard.token_ids)
    together = make_driver(loaded, quantization="int8")
    heard = [
        together.submit(p, max_output_tokens=16, ignore_eos=True, temperature=temperature, seed=3) for p in prompts
    ]
    together.run()
    assert [h.token_ids for h in heard] == alone
