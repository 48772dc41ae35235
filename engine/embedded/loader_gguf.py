"""GGUF files of the Llama architecture as a ``WeightSource`` and a tokenizer's description."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trimtab.engine.embedded.config import ModelConfig
from trimtab.engine.embedded.gguf_blocks import Blocks4, Blocks8, dequantize, split_4bit, split_8bit
from trimtab.engine.embedded.gguf_file import GGUFFile, TensorInfo, TensorType
from trimtab.engine.embedded.tokenizer import Tokenizer, bpe_tokenizer
from trimtab.engine.embedded.weights import EMBEDDING, FINAL_NORM, HEAD, expected_shapes
from trimtab.errors import ModelFileError

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OTHER_NAMES = {EMBEDDING: "token_embd", FINAL_NORM: "output_norm", HEAD: "output"}
_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type


class GGUFWeights:
    """The weights of an open GGUF file."""

    def __init__(self, file: GGUFFile, where: str) -> None:
        """Raises ``ModelFileError`` for another architecture, a missing tensor or a wrong shape."""
        self._file = file
        self._where = where
        self._config = _config(file, where)
        for name, shape in expected_shapes(self._config).items():
            info = self._info(name)
            if info.shape != shape:
                raise ModelFileError(f"{where}: tensor {info.name} has shape {info.shape}; expected {shape}")
        # A bias or a table of rotary factors that is left out makes a model that answers, and answers wrongly.
        unused = sorted(set(file.tensors) - {_stored_name(name) for name in expected_shapes(self._config)})
        if unused:
            raise ModelFileError(f"{where}: tensor {unused[0]} is not built; accepted: a plain Llama without biases")

    @property
    def config(self) -> ModelConfig:
        return self._config

    def dense(self, name: str) -> Tensor:
        info = self._info(name)
        values = dequantize(self._file.data(info), info.shape, info.type)
        return torch.from_numpy(np.ascontiguousarray(self._row_order(name, values)))

    def blocks(self, name: str) -> Blocks4 | Blocks8 | None:
        info = self._info(name)
        if info.type is TensorType.Q8_0:
            eights = split_8bit(self._file.data(info), info.shape)
            return Blocks8(self._row_order(name, eights.values), self._row_order(name, eights.scales))
        if info.type not in (TensorType.Q4_0, TensorType.Q4_1):
            return None
        found = split_4bit(self._file.data(info), info.shape, info.type)
        parts = (self._row_order(name, part) for part in (found.quants, found.scales, found.minima))
        return Blocks4(*parts)

    def _info(self, name: str) -> TensorInfo:
        stored = _stored_name(name)
        info = self._file.tensors.get(stored)
        if info is None:
            raise ModelFileError(f"{self._where}: tensor {stored} is missing")
        return info

    def _row_order(self, name: str, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Undoes llama.cpp's interleaving of each head's rotary halves in the rows of Q and K."""
        if name.endswith("q_proj"):
            num_heads = self._config.num_heads
        elif name.endswith("k_proj"):
            num_heads = self._config.num_kv_heads
        else:
            return rows
        half = self._config.head_dim // 2
        return rows.reshape(num_heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _stored_name(name: str) -> str:
    if name in _OTHER_NAMES:
        return f"{_OTHER_NAMES[name]}.weight"
    _, _, layer, inner = name.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[inner]}.weight"


def _config(file: GGUFFile, where: str) -> ModelConfig:
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ModelFileError(f"{where}: architecture {architecture!r}; accepted: llama")

    def number(key: str, default: float | None = None) -> Any:
        value = metadata.get(f"llama.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelFileError(f"{where}: llama.{key} is {value!r}; expected a number")
        if not math.isfinite(value):
            raise ModelFileError(f"{where}: llama.{key} is {value!r}; expected a finite number")
        return value

    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise ModelFileError(f"{where}: rope scaling {scaling!r} is not built; accepted: none")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelFileError(f"{where}: tensor token_embd.weight is missing")
    num_heads = int(number("attention.head_count"))
    hidden_size = int(number("embedding_length"))
    config = ModelConfig(
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        num_layers=int(number("block_count")),
        num_heads=num_heads,
        num_kv_heads=int(number("attention.head_count_kv", num_heads)),
        head_dim=int(number("attention.key_length", hidden_size // max(1, num_heads))),
        intermediate_size=int(number("feed_forward_length")),
        max_context_tokens=int(number("context_length")),
        rms_norm_eps=float(number("attention.layer_norm_rms_epsilon")),
        rope_theta=float(number("rope.freq_base", 10000.0)),
        tied_head="output.weight" not in file.tensors,
    )
    config.check(where)
    num_rotated = number("rope.dimension_count", config.head_dim)
    if num_rotated != config.head_dim:
        raise ModelFileError(
            f"{where}: llama.rope.dimension_count is {num_rotated}; accepted: head_dim, {config.head_dim}"
        )
    return config


def gguf_tokenizer(file: GGUFFile, where: str) -> Tokenizer:
    """The byte-level BPE tokenizer and chat template in the file. Raises ``ModelFileError``."""
    metadata = file.metadata
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or pre not in ("smollm", "gpt-2", "default"):
        raise ModelFileError(f"{where}: tokenizer {kind!r} with {pre!r}; accepted: gpt2 with smollm or gpt-2")
    tokens, merges = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.merges")
    kinds = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or not isinstance(merges, list):
        raise ModelFileError(f"{where}: the tokenizer's tokens or merges are missing")
    eos, bos = metadata.get("tokenizer.ggml.eos_token_id"), metadata.get("tokenizer.ggml.bos_token_id")
    template = metadata.get("tokenizer.chat_template")
    try:
        control = [t for t, k in zip(tokens, [] if kinds is None else kinds, strict=False) if k == _CONTROL_TOKEN]
        return bpe_tokenizer(
            tokens,
            [tuple(m.split(" ", 1)) for m in merges],
            control,
            split_digits=pre == "smollm",
            eos_ids=frozenset({int(eos)} if eos is not None else ()),
            bos_id=int(bos) if bos is not None else None,
            add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
            chat_template=template if isinstance(template, str) else None,
        )
    except (ValueError, TypeError, OverflowError) as error:
        raise ModelFileError(f"{where}: the tokenizer cannot be built: {error}") from error
