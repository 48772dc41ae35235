"""The compiled kernels as Python calls them: structures as in ``src/decoder.h``, and the entry points.

Nothing is checked here: ``decoder`` and ``operations`` check every shape and index before they call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import cast

from trimtab.kernels.cpu.build import Level, build


class WeightStruct(Structure):
    _fields_ = (("panels", c_void_p), ("columns", c_int64), ("num_panels", c_int64), ("format", c_int32))


class LayerStruct(Structure):
    _fields_ = (
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("qkv", WeightStruct),
        ("output", WeightStruct),
        ("gate_up", WeightStruct),
        ("down", WeightStruct),
    )


class ModelStruct(Structure):
    _fields_ = (
        ("hidden_size", c_int64),
        ("num_layers", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("vocab_size", c_int64),
        ("rms_norm_eps", c_float),
        ("inverse_frequencies", c_void_p),
        ("final_norm", c_void_p),
        ("layers", POINTER(LayerStruct)),
        ("embedding", WeightStruct),
        ("head", WeightStruct),
    )


class CacheStruct(Structure):
    _fields_ = (
        ("full", c_void_p),
        ("int8", c_void_p),
        ("int8_scales", c_void_p),
        ("int4", c_void_p),
        ("int4_scales", c_void_p),
        ("num_blocks", c_int64 * 3),
        ("block_size", c_int64),
        ("write_type", c_int32),
    )


class BatchStruct(Structure):
    _fields_ = (
        ("num_tokens", c_int32),
        ("num_spans", c_int32),
        ("num_logit_rows", c_int32),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("spans", c_void_p),
        ("tables", c_void_p),
        ("logit_rows", c_void_p),
        ("logits", c_void_p),
        ("best", c_void_p),
    )


class Library:
    """One level's kernels, loaded. Calls release the interpreter lock."""

    def __init__(self, level: Level, folder: Path) -> None:
        """Builds the library in ``folder`` if it is not there. Raises ``KernelBuildError``."""
        self.level = level
        self._library = ctypes.CDLL(str(build(level, folder)))
        self._functions = {name: self._function(name, types) for name, types in _ARGUMENTS.items()}
        self._destroy = self._library.trimtab_decoder_destroy
        self._destroy.argtypes, self._destroy.restype = [c_void_p], None

    def create(self, model: ModelStruct, num_threads: int) -> c_void_p:
        """A decoder with threads of its own; what ``model`` points to must outlive it. Raises ``MemoryError``."""
        created = c_void_p()
        self.call("decoder_create", model, num_threads, created)
        return created

    def destroy(self, decoder: c_void_p) -> None:
        self._destroy(decoder)

    def call(self, name: str, *arguments: object) -> None:
        """Calls ``trimtab_<name>``; structures go by reference. Raises ``MemoryError``."""
        if self._functions[name](*arguments):
            raise MemoryError(f"{name}: no memory, or no threads")

    def _function(self, name: str, types: Sequence[type]) -> Callable[..., int]:
        function = getattr(self._library, f"trimtab_{name}")
        function.argtypes, function.restype = types, c_int
        return cast(Callable[..., int], function)


_ARGUMENTS: Mapping[str, Sequence[type]] = {
    "decoder_create": (POINTER(ModelStruct), c_int64, POINTER(c_void_p)),
    "decoder_step": (c_void_p, POINTER(CacheStruct), POINTER(BatchStruct)),
    "linear": (POINTER(WeightStruct), c_void_p, c_int64, c_void_p),
    "look_up": (POINTER(WeightStruct), c_int64, c_void_p),
    "write_tokens": (POINTER(CacheStruct), c_int64, c_int64, c_int64, c_void_p, c_int64, c_void_p),
    "attention": (POINTER(CacheStruct), POINTER(BatchStruct), *[c_int64] * 3, c_void_p, c_void_p),
}
