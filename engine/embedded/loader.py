"""From a path to a ready model. Signature first; the body follows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trimtab.engine.embedded.model import LlamaModel
from trimtab.engine.embedded.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its tokenizer. ``digest`` is the SHA-256 of the file, or of a folder's files."""

    model: LlamaModel
    tokenizer: Tokenizer
    digest: str


def load_model(path: Path, quantization: str) -> LoadedModel:
    """Loads a ``.gguf`` file or a Hugging Face folder. Raises ``ModelFileError``."""
    raise NotImplementedError
