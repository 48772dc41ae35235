"""What a model file is, for keys that go stale with it: its digest and size."""

from __future__ import annotations

from pathlib import Path

from trimtab.engine.models import model_digest
from trimtab.experiments.memory import ModelFacts


def model_facts(path: Path, name: str) -> ModelFacts:
    """Digest and size of a model file, or of a folder's files. Raises ``OSError``."""
    files = [p for p in path.iterdir() if p.is_file()] if path.is_dir() else [path]
    return ModelFacts(name, model_digest(path), sum(f.stat().st_size for f in files))
