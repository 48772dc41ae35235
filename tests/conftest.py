"""Models for every test: a tiny random one made here, and the real one from the cache."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings as hypothesis_settings
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trimtab.engine.embedded.config import ModelConfig
from trimtab.engine.embedded.weights import expected_shapes
from trimtab.engine.models import cached_path

# Timings belong to benchmarks; a shared machine makes any deadline flaky.
hypothesis_settings.register_profile("trimtab", deadline=None)
hypothesis_settings.load_profile("trimtab")

TINY = ModelConfig(
    vocab_size=512,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    max_context_tokens=1024,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tied_head=True,
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The real model's GGUF file."""
    named = os.environ.get("TRIMTAB_TEST_MODEL")
    cache = Path(os.environ.get("TRIMTAB_CACHE") or Path.home() / ".cache/trimtab")
    path = Path(named) if named else cached_path("smollm2-135m-instruct", cache)
    if path is None:
        pytest.fail("the model is not in the cache: `make test` fetches it, or `trimtab model fetch`")
    return path


@pytest.fixture(scope="session")
def kernel_cache() -> Path:
    """Where the native kernels are built: kept between runs, because it takes half a minute."""
    return Path(os.environ.get("TRIMTAB_CACHE") or Path.home() / ".cache/trimtab") / "kernels"


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with a real byte-level BPE tokenizer, as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("tiny-model")
    write_llama_folder(folder, TINY, random_weights(TINY))
    write_tokenizer(folder, TINY.vocab_size)
    return folder


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights large enough that the random model prefers tokens clearly."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in expected_shapes(config).items():
        if len(shape) == 1:
            weights[f"{name}.weight"] = 1 + 0.1 * torch.randn(shape, generator=generator)
        else:
            weights[f"{name}.weight"] = torch.randn(shape, generator=generator) * (2.0 / shape[1]) ** 0.5
    return weights


def write_llama_folder(folder: Path, config: ModelConfig, weights: dict[str, torch.Tensor]) -> None:
    """A folder that both `transformers` and the engine read; no tokenizer."""
    save_file({n: t.contiguous() for n, t in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    content = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_context_tokens,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "hidden_act": "silu",
        "tie_word_embeddings": config.tied_head,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(content))


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = (Path(__file__).parents[1] / "experiments/texts/calibration.txt").read_text()
    tokenizer.train_from_iterator(text.splitlines(), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
