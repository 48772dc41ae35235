"""Hugging Face folders (config.json, safetensors, tokenizer.json) of the Llama architecture as a ``WeightSource``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trimtab.engine.embedded.config import ModelConfig
from trimtab.engine.embedded.gguf_blocks import Blocks4, Blocks8
from trimtab.engine.embedded.tokenizer import Tokenizer, load_tokenizer_json
from trimtab.engine.embedded.weights import expected_shapes
from trimtab.errors import ModelFileError

_MAX_TEXT_BYTES = 64 * 1024 * 1024


class SafetensorsWeights:
    """The weights of a folder, in one file or in shards with an index."""

    def __init__(self, folder: Path) -> None:
        """Raises ``ModelFileError`` for another architecture, a missing tensor or a wrong shape."""
        self._folder = folder
        self._config = _config(folder)
        self._file_of = _index(folder)
        for name, shape in expected_shapes(self._config).items():
            found = self._shape(name)
            if found != shape:
                raise ModelFileError(f"{folder}: tensor {name}.weight has shape {found}; expected {shape}")

    @property
    def config(self) -> ModelConfig:
        return self._config

    def dense(self, name: str) -> Tensor:
        try:
            with safe_open(self._path(name), framework="pt") as file:
                tensor: Tensor = file.get_tensor(f"{name}.weight")
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"{self._path(name)}: {name}.weight cannot be read: {error}") from error
        if not tensor.is_floating_point():
            raise ModelFileError(f"{self._path(name)}: {name}.weight is {tensor.dtype}; accepted: float types")
        return tensor.to(torch.float32)

    def blocks(self, name: str) -> Blocks4 | Blocks8 | None:  # noqa: ARG002  safetensors have no blocks
        return None

    def _path(self, name: str) -> Path:
        file = self._file_of.get(f"{name}.weight")
        if file is None:
            raise ModelFileError(f"{self._folder}: tensor {name}.weight is missing")
        return self._folder / file

    def _shape(self, name: str) -> tuple[int, ...]:
        try:
            with safe_open(self._path(name), framework="pt") as file:
                return tuple(file.get_slice(f"{name}.weight").get_shape())
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"{self._path(name)}: {name}.weight cannot be read: {error}") from error


def _index(folder: Path) -> dict[str, str]:
    """Maps each tensor to its file. Raises ``ModelFileError``."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        mapped = _json(index).get("weight_map")
        if not isinstance(mapped, dict) or any(Path(str(f)).name != f for f in mapped.values()):
            raise ModelFileError(f"{index}: weight_map must map tensors to files of this folder")
        return {str(name): str(file) for name, file in mapped.items()}
    single = folder / "model.safetensors"
    try:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single.name)
    except (SafetensorError, OSError) as error:
        raise ModelFileError(f"{single}: cannot be read: {error}") from error


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_TEXT_BYTES:
            raise ModelFileError(f"{path}: over {_MAX_TEXT_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path}: cannot be read: {error}") from error


def _json(path: Path) -> dict[str, Any]:
    text = _text(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelFileError(f"{path}: found {type(content).__name__}; expected an object")
    return content


def _config(folder: Path) -> ModelConfig:
    path = folder / "config.json"
    content = _json(path)
    if content.get("model_type") != "llama":
        raise ModelFileError(f"{path}: model_type {content.get('model_type')!r}; accepted: llama")
    rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ModelFileError(f"{path}: rope parameters {rope!r}; expected an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    refused = {
        "hidden_act": content.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(content.get("attention_bias", False)),
        "mlp_bias": bool(content.get("mlp_bias", False)),
        "quantization_config": content.get("quantization_config") is not None,
        f"rope type {kind!r}": kind != "default",
    }
    for what, found in refused.items():
        if found:
            raise ModelFileError(
                f"{path}: {what} is not built; accepted: a plain Llama (silu, no biases, default rope)"
            )
    try:
        hidden_size, num_heads = int(content["hidden_size"]), int(content["num_attention_heads"])
        config = ModelConfig(
            vocab_size=int(content["vocab_size"]),
            hidden_size=hidden_size,
            num_layers=int(content["num_hidden_layers"]),
            num_heads=num_heads,
            num_kv_heads=int(content.get("num_key_value_heads") or num_heads),
            head_dim=int(content.get("head_dim") or hidden_size // num_heads),
            intermediate_size=int(content["intermediate_size"]),
            max_context_tokens=int(content["max_position_embeddings"]),
            rms_norm_eps=float(content["rms_norm_eps"]),
            rope_theta=float(rope.get("rope_theta") or content.get("rope_theta") or 10000.0),
            tied_head=bool(content.get("tie_word_embeddings", False)),
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise ModelFileError(f"{path}: {type(error).__name__}: {error}") from error
    config.check(str(path))
    return config


def folder_tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer and chat template. Raises ``ModelFileError``."""
    config = _json(folder / "config.json")
    settings = _json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    template = settings.get("chat_template")
    if (folder / "chat_template.jinja").exists():
        template = _text(folder / "chat_template.jinja")
    eos, bos = config.get("eos_token_id"), config.get("bos_token_id")
    eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    for token_id in (*eos_ids, *([] if bos is None else [bos])):
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < 1 << 32:
            raise ModelFileError(f"{folder / 'config.json'}: token id {token_id!r}; expected a whole number from 0")
    return load_tokenizer_json(
        folder / "tokenizer.json",
        eos_ids=frozenset(eos_ids),
        bos_id=bos,
        chat_template=template if isinstance(template, str) and template else None,
    )
