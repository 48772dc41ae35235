"""From a path to a ready model: a ``.gguf`` file or a Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trimtab.engine.embedded.gguf_file import GGUFFile
from trimtab.engine.embedded.loader_gguf import GGUFWeights, gguf_tokenizer
from trimtab.engine.embedded.loader_safetensors import SafetensorsWeights, folder_tokenizer
from trimtab.engine.embedded.model import Model
from trimtab.engine.embedded.native_model import NativeKernels, NativeLlama, is_native
from trimtab.engine.embedded.tokenizer import Tokenizer
from trimtab.engine.embedded.torch_model import TorchLlama
from trimtab.engine.embedded.weights import WeightSource
from trimtab.engine.models import model_digest
from trimtab.errors import ModelFileError


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its tokenizer. ``digest`` is the SHA-256 of the file, or of a folder's files."""

    model: Model
    tokenizer: Tokenizer
    digest: str


def load_model(path: Path, quantization: str, kernels: NativeKernels | None = None) -> LoadedModel:
    """Loads a model; on torch's operations without ``kernels``, and where these cannot run it.

    Raises:
        ModelFileError: with what was found and what is accepted.
    """
    if path.is_dir():
        source = SafetensorsWeights(path)
        loaded = LoadedModel(_model(source, quantization, kernels), folder_tokenizer(path), model_digest(path))
    else:
        with GGUFFile(path) as file:
            tokenizer = gguf_tokenizer(file, str(path))
            model = _model(GGUFWeights(file, str(path)), quantization, kernels)
            loaded = LoadedModel(model, tokenizer, model_digest(path))
    if loaded.tokenizer.vocab_size > loaded.model.config.vocab_size:
        raise ModelFileError(
            f"{path}: the tokenizer has {loaded.tokenizer.vocab_size} tokens, the model only"
            f" {loaded.model.config.vocab_size}"
        )
    return loaded


def _model(source: WeightSource, quantization: str, kernels: NativeKernels | None) -> Model:
    if kernels is not None and is_native(source.config, quantization):
        return NativeLlama(source, quantization, kernels)
    return TorchLlama(source, quantization)
