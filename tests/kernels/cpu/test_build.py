"""Building the native kernels: once, whole, private, and with one clear line when it cannot be done."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trimtab.errors import KernelBuildError
from trimtab.kernels.cpu.build import LEVELS, build, supported_levels

PLAIN = LEVELS[-1]


def fake_compiler(folder: Path, script: str) -> Path:
    """A `g++` that does what ``script`` says; its last argument is the output."""
    folder.mkdir()
    compiler = folder / "g++"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    return folder


def test_the_best_level_comes_first_and_any_cpu_has_plain() -> None:
    supported = supported_levels()
    assert supported[-1] == PLAIN
    assert [level for level in LEVELS if level in supported] == list(supported)


def test_processes_that_start_together_compile_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    script = f'[ "$1" = --version ] && exec echo 1\necho run >> {log}\nsleep 1\nfor x; do :; done\necho made > "$x"'
    monkeypatch.setenv("PATH", f"{fake_compiler(tmp_path / 'bin', script)}:{os.environ['PATH']}")
    command = [sys.executable, "-m", "trimtab.kernels.cpu", "build", "--folder", str(tmp_path / "cache")]
    command += ["--level", "plain"]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    paths = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0, 0]
    assert log.read_text() == "run\n"
    assert [Path(path).read_text() for path in paths] == ["made\n"]
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == ["build.lock", Path(next(iter(paths))).name]


def test_a_build_that_is_killed_leaves_nothing_to_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = '[ "$1" = --version ] && exec echo 1\nfor x; do :; done\necho half > "$x"\nexec sleep 60'
    monkeypatch.setenv("PATH", f"{fake_compiler(tmp_path / 'bin', script)}:{os.environ['PATH']}")
    command = [sys.executable, "-m", "trimtab.kernels.cpu", "build", "--folder", str(tmp_path / "cache")]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONSAFEPATH": "1"}, start_new_session=True)
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob("cache/*/*.so")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, 9)
    process.wait(10)
    assert not list(tmp_path.glob("cache/*.so"))


def test_other_flags_sources_or_compilers_are_other_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = '[ "$1" = --version ] && exec echo "$VERSION"\nfor x; do :; done\necho made > "$x"'
    monkeypatch.setenv("PATH", f"{fake_compiler(tmp_path / 'bin', script)}:{os.environ['PATH']}")
    paths = set()
    for version in ("1", "2", "2"):
        monkeypatch.setenv("VERSION", version)
        paths.add(build(PLAIN, tmp_path / "cache"))
    paths.add(build(LEVELS[0], tmp_path / "cache"))
    assert len(paths) == 3


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = '[ "$1" = --version ] && exec echo 1\necho "decoder.cpp:3:1: error: no such thing" >&2\nexit 1'
    monkeypatch.setenv("PATH", f"{fake_compiler(tmp_path / 'bin', script)}:{os.environ['PATH']}")
    with pytest.raises(KernelBuildError, match="no such thing"):
        build(PLAIN, tmp_path / "cache")
    assert not list(tmp_path.glob("cache/*.so"))


def test_without_a_compiler_the_message_names_those_that_would_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelBuildError, match=r"no C\+\+ compiler: none of g\+\+, clang\+\+, c\+\+ is on the PATH"):
        build(PLAIN, tmp_path / "cache")


@pytest.mark.parametrize("mode", [0o777, 0o720])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(mode)
    with pytest.raises(KernelBuildError, match="only they may write to it"):
        build(PLAIN, tmp_path / "cache")


def test_a_built_library_exports_its_functions_only(kernel_cache: Path) -> None:
    path = build(supported_levels()[0], kernel_cache)
    assert ctypes.CDLL(str(path)).trimtab_decoder_step
    listed = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1] for line in listed.splitlines() if line.split()[-2] == "T"}
    assert names
    assert all(name.startswith("trimtab_") for name in names), names
