"""Starts, recognises and ends detached processes. Engine replicas, trial engines and Envoy all run through here.

A process is recorded before it is executed: the child is a shell that waits for one line on its standard input, the
parent hands the record to its caller (who writes it down), and only then sends the line. A parent that dies in
between closes the pipe, and the child leaves without having become anything. A record names a process beyond
doubt: a pid may be reused, its start time and nonce are not.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from trimtab.errors import EngineStartError

NONCE_VARIABLE = "TRIMTAB_NONCE"

# Fixed text; the command's words arrive as arguments and are never parsed by the shell.
_WAIT_THEN_EXEC = 'IFS= read -r go || exit 125; exec "$@" </dev/null'


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to run. ``cpus`` empty means every CPU that the parent may use. ``env`` is added to the parent's."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cpus: tuple[int, ...]
    log_path: Path


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """Names one process beyond doubt. ``start_ticks`` is field 22 of ``/proc/PID/stat``."""

    pid: int
    start_ticks: int
    nonce: str


def spawn(spec: ProcessSpec, record: Callable[[ProcessRecord], None]) -> ProcessRecord:
    """Starts ``spec`` detached in a session of its own; calls ``record`` before it is executed.

    Raises:
        EngineStartError: the log cannot be opened, the process cannot be created, or it may not use the CPUs.
        Exception: whatever ``record`` raises; the child has then ended unexecuted.
    """
    nonce = secrets.token_hex(16)
    env = {**os.environ, **spec.env, NONCE_VARIABLE: nonce, "PYTHONSAFEPATH": "1"}
    try:
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        with spec.log_path.open("ab") as log:
            child = subprocess.Popen(
                ["/bin/sh", "-c", _WAIT_THEN_EXEC, "trimtab-launch", *spec.argv],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
                close_fds=True,
            )
    except OSError as error:
        raise EngineStartError(f"cannot start {spec.argv[0]}: {error}") from error
    assert child.stdin is not None
    try:
        _pin(child.pid, spec.cpus)
        made = ProcessRecord(child.pid, _start_ticks(child.pid) or 0, nonce)
        record(made)
        child.stdin.write(b"go\n")
    finally:
        child.stdin.close()
        # The process outlives us; Popen must neither wait for it nor warn about it.
        child.returncode = 0
    return made


def own_record() -> ProcessRecord:
    """This very process, as ``spawn`` recorded it; a process that ``spawn`` did not start has an empty nonce."""
    return ProcessRecord(os.getpid(), _start_ticks(os.getpid()) or 0, os.environ.get(NONCE_VARIABLE, ""))


def is_running(record: ProcessRecord) -> bool:
    """Whether the recorded process is alive. A zombie is not."""
    if _start_ticks(record.pid) != record.start_ticks:
        return False
    return _nonce(record.pid) in (record.nonce, None)


def exit_code(record: ProcessRecord) -> int | None:
    """The exit code of a child of ours that has ended and is not yet reaped; ``None`` when alive or unknown.

    A negative value is the signal that ended it. The answer stays until ``reap``.
    """
    try:
        ended = os.waitid(os.P_PID, record.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def reap(record: ProcessRecord) -> None:
    """Forgets a child of ours that has ended. Does nothing for anyone else's."""
    try:
        os.waitpid(record.pid, os.WNOHANG)
    except ChildProcessError:
        return


def terminate(record: ProcessRecord, grace_s: float) -> None:
    """Sends SIGTERM, waits up to ``grace_s``, then kills the session. Returns when it is gone and reaped."""
    if is_running(record):
        _signal_group(record.pid, signal.SIGTERM)
        if not _wait_gone(record, grace_s):
            _signal_group(record.pid, signal.SIGKILL)
            _wait_gone(record, 10.0)
    reap(record)


def _pin(pid: int, cpus: tuple[int, ...]) -> None:
    if not cpus:
        return
    try:
        os.sched_setaffinity(pid, cpus)
    except OSError as error:
        raise EngineStartError(f"cannot run on the CPUs {', '.join(map(str, cpus))}: {error}") from error


def _wait_gone(record: ProcessRecord, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while is_running(record):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


def _signal_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return


def _start_ticks(pid: int) -> int | None:
    """Field 22 of ``/proc/PID/stat``, or ``None`` for no such process or a zombie (man 5 proc)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rsplit(")", 1)[1].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def _nonce(pid: int) -> str | None:
    """The nonce in the process's environment (empty: another's); ``None`` where nothing can be read."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    if not environ:  # so it reads at the moment in which the process is being executed
        return None
    for item in environ.split(b"\0"):
        name, _, value = item.partition(b"=")
        if name == NONCE_VARIABLE.encode():
            return value.decode()
    return ""
