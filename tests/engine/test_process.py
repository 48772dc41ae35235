"""Detached processes: recorded before they run, recognised beyond doubt, ended whole."""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from trimtab.engine.process import ProcessRecord, ProcessSpec, exit_code, is_running, reap, spawn, terminate
from trimtab.errors import EngineStartError


def spec(tmp_path: Path, code: str) -> ProcessSpec:
    return ProcessSpec((sys.executable, "-c", code), {}, (), tmp_path / "log")


def wait_until_ended(record: ProcessRecord) -> None:
    deadline = time.monotonic() + 10
    while is_running(record):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_is_recorded_before_it_is_executed(tmp_path: Path) -> None:
    seen = []

    def record(made: ProcessRecord) -> None:
        time.sleep(0.2)
        seen.append((made, (tmp_path / "ran").exists()))

    made = spawn(spec(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')"), record)
    assert seen == [(made, False)]
    wait_until_ended(made)
    assert (tmp_path / "ran").exists()
    assert exit_code(made) == 0
    reap(made)


def test_a_failed_recording_leaves_nothing_behind(tmp_path: Path) -> None:
    made: list[ProcessRecord] = []

    def record(record: ProcessRecord) -> None:
        made.append(record)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        spawn(spec(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')"), record)
    wait_until_ended(made[0])
    assert exit_code(made[0]) == 125
    assert not (tmp_path / "ran").exists()
    reap(made[0])


def test_a_process_that_ignores_sigterm_is_killed_with_its_children(tmp_path: Path) -> None:
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(p.pid)); time.sleep(60)"
    )
    made = spawn(spec(tmp_path, code), lambda _: None)
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        time.sleep(0.01)
    terminate(made, grace_s=0.2)
    assert not is_running(made)
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 5
    while Path(f"/proc/{child}").exists() and " Z " not in Path(f"/proc/{child}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_reused_pid_is_not_taken_for_the_recorded_process(tmp_path: Path) -> None:
    made = spawn(spec(tmp_path, "import time; time.sleep(60)"), lambda _: None)
    try:
        assert is_running(made)
        assert not is_running(replace(made, start_ticks=made.start_ticks + 1))
        time.sleep(0.2)
        assert not is_running(replace(made, nonce="0" * 32))
    finally:
        terminate(made, grace_s=1)


def test_its_cpus_are_those_asked_for(tmp_path: Path) -> None:
    cpu = max(os.sched_getaffinity(0))
    made = spawn(replace(spec(tmp_path, "import time; time.sleep(60)"), cpus=(cpu,)), lambda _: None)
    try:
        assert os.sched_getaffinity(made.pid) == {cpu}
    finally:
        terminate(made, grace_s=1)


def test_a_cpu_that_is_not_there_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match="cannot run on the CPUs 1023"):
        spawn(replace(spec(tmp_path, ""), cpus=(1023,)), lambda _: None)


def test_a_process_whose_environment_reads_empty_is_still_itself(tmp_path: Path) -> None:
    made = spawn(replace(spec(tmp_path, ""), argv=("/usr/bin/env", "-i", "/bin/sleep", "60")), lambda _: None)
    try:
        deadline = time.monotonic() + 10
        while Path(f"/proc/{made.pid}/environ").read_bytes():
            assert is_running(made)
            assert time.monotonic() < deadline
        assert is_running(made)
    finally:
        terminate(made, grace_s=1)


def test_an_exit_by_signal_is_negative(tmp_path: Path) -> None:
    made = spawn(spec(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"), lambda _: None)
    wait_until_ended(made)
    assert exit_code(made) == -9
    reap(made)
