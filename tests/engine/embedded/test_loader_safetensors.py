"""Hugging Face folders: a damaged one is one clear error, whatever part of it is damaged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from trimtab.engine.embedded.loader import load_model
from trimtab.errors import ModelFileError


@pytest.fixture
def folder(tmp_path: Path, tiny_model_dir: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def change_config(folder: Path, **changed: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def shard(folder: Path, data: bytes | None) -> None:
    """Moves the weights into a shard with an index and replaces its bytes; ``None`` leaves the shard out."""
    single = folder / "model.safetensors"
    with safe_open(single, framework="pt") as file:
        names = list(file.keys())
    single.unlink()
    index = {"weight_map": dict.fromkeys(names, "shard.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if data is not None:
        (folder / "shard.safetensors").write_bytes(data)


def test_a_sharded_folder_loads(folder: Path) -> None:
    shard(folder, (folder / "model.safetensors").read_bytes())
    assert load_model(folder, "fp32").model.config.num_layers == 2


@pytest.mark.parametrize("num_bytes", [0, 100, 5000, None])
def test_a_damaged_or_missing_shard_is_one_clear_error(folder: Path, num_bytes: int | None) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    shard(folder, None if num_bytes is None else whole[:num_bytes])
    with pytest.raises(ModelFileError, match=r"shard\.safetensors"):
        load_model(folder, "fp32")


@pytest.mark.parametrize(
    "changed",
    [
        {"model_type": "gemma3"},
        {"attention_bias": True},
        {"rope_parameters": {"rope_type": "yarn"}},
        {"rope_parameters": [1]},
        {"rope_parameters": {"rope_theta": "x"}},
        {"num_attention_heads": 0},
        {"num_attention_heads": 0, "head_dim": None},
        {"num_key_value_heads": -2},
        {"vocab_size": float("inf")},
        {"hidden_size": None},
        {"eos_token_id": "x"},
        {"eos_token_id": 10**12},
        {"bos_token_id": -1},
    ],
)
def test_a_configuration_that_is_not_a_plain_llama_is_refused(folder: Path, changed: dict[str, Any]) -> None:
    change_config(folder, **changed)
    with pytest.raises(ModelFileError, match=r"config\.json"):
        load_model(folder, "fp32")


def test_a_chat_template_that_is_no_text_is_one_clear_error(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"{{ messages }} \xff\xfe")
    with pytest.raises(ModelFileError, match=r"chat_template\.jinja: cannot be read"):
        load_model(folder, "fp32")
