"""What a model file is, for keys that go stale with it: its digest and size."""

from __future__ import annotations

import hashlib
from pathlib import Path

from trimtab.experiments.memory import ModelFacts


def model_facts(path: Path, name: str) -> ModelFacts:
    """Hashes a model file, or every file of a model's folder in name order."""
    files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        if path.is_dir():
            digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as opened:
            while chunk := opened.read(1 << 20):
                digest.update(chunk)
    return ModelFacts(name, digest.hexdigest(), sum(f.stat().st_size for f in files))
