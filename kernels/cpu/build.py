"""Compiles the C++ kernels, once for a machine: at first use, or ahead of time by ``trimtab kernels build``.

A library is cached under a key of its sources, flags, compiler and CPU, built under a lock, and put in place by an
atomic rename: processes that start together build it once, and none ever loads a half.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from trimtab.errors import KernelBuildError

_SOURCES = Path(__file__).parent / "src"
_UNITS = ("decoder.cpp", "operations.cpp")
_COMPILERS = ("g++", "clang++", "c++")
_FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-pthread", "-fvisibility=hidden", "-mtune=native")
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Level:
    """A set of instructions: what /proc/cpuinfo must list, and what the compiler is told."""

    name: str
    cpu_flags: tuple[str, ...]
    compiler_flags: tuple[str, ...]


_AVX2 = Level("avx2", ("avx2", "fma", "f16c"), ("-mavx2", "-mfma", "-mf16c"))
_AVX512 = Level(
    "avx512",
    (*_AVX2.cpu_flags, "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"),
    (*_AVX2.compiler_flags, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"),
)
LEVELS = (_AVX512, _AVX2, Level("plain", (), ()))  # the best first


def supported_levels() -> tuple[Level, ...]:
    """The levels that this CPU runs, the best first; ``plain`` is always among them."""
    return tuple(level for level in LEVELS if set(level.cpu_flags) <= _cpu_flags())


def build(level: Level, folder: Path) -> Path:
    """The library of one level in ``folder``, compiled if it is not there yet (some 20 s).

    Raises:
        KernelBuildError: no compiler, no place to write, or the compiler failed.
    """
    compiler = _compiler()
    flags = (*_FLAGS, *level.compiler_flags)
    target = folder / f"trimtab-{level.name}-{_key(compiler, flags)}.so"
    try:
        _make_private(folder)
        with _locked(folder / "build.lock"):
            if not target.exists():
                _compile([compiler, *flags, *(str(_SOURCES / unit) for unit in _UNITS)], target)
    except OSError as error:
        raise KernelBuildError(f"cannot build kernels in {folder}: {error.strerror or error}") from error
    return target


def _compile(command: list[str], target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        try:
            result = subprocess.run(
                [*command, "-o", str(made)], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise KernelBuildError(f"{command[0]} took more than {_TIMEOUT_S:.0f} s") from error
        if result.returncode != 0:
            lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
            why = next((line for line in lines if "error" in line), lines[-1])
            raise KernelBuildError(f"{command[0]} failed: {why}")
        made.replace(target)


def _compiler() -> str:
    for name in _COMPILERS:
        if found := shutil.which(name):
            return found
    raise KernelBuildError(f"no C++ compiler: none of {', '.join(_COMPILERS)} is on the PATH")


def _key(compiler: str, flags: tuple[str, ...]) -> str:
    """What a library depends on; `-mtune=native` makes the CPU's model part of it."""
    digest = hashlib.sha256(" ".join(flags).encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    digest.update(subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout)
    digest.update(_cpu_model().encode())
    return digest.hexdigest()[:20]


def _make_private(folder: Path) -> None:
    """Libraries are run: nobody else may be able to put one there."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise KernelBuildError(f"{folder} must belong to this user, and only they may write to it")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@cache
def _cpu_flags() -> frozenset[str]:
    return frozenset(_cpu_line("flags").split())


def _cpu_model() -> str:
    return " ".join(_cpu_line(name) for name in ("vendor_id", "cpu family", "model", "stepping", "model name"))


def _cpu_line(name: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition("\t")[0].strip() == name), "")
