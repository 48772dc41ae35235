"""What every benchmark shares: the row, the description of the machine, the file, and resuming by round."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. ``against`` names what ``ratio`` divides by; ``low`` and ``high`` are the extremes of the rounds.

    ``goal`` says in words what should hold; ``met`` whether it does. ``None``: there is no such thing.
    """

    case: str
    value: float
    unit: str
    against: str | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    goal: str | None = None
    met: bool | None = None

    @classmethod
    def of(cls, case: str, values: Sequence[float], unit: str, **more: Any) -> Row:
        """The median of the rounds' ``values``, and their extremes."""
        return cls(case, median(values), unit, low=min(values), high=max(values), **more)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options of every benchmark."""
    made = argparse.ArgumentParser(description=doc)
    made.add_argument("--quick", action="store_true", help="a minute instead of several; the figures are rougher")
    made.add_argument("--json", type=Path, help="write the result here; a run that was cut short resumes from it")
    return made


def cpu_s() -> float:
    """The clock of benchmarks that compute on one thread: the CPU time of this process.

    On a core of its own it runs as fast as the wall's. On a shared machine it leaves out the time that others had the
    core; what they take of caches and memory bandwidth stays in.
    """
    return time.process_time()


def run_rounds(num_rounds: int, run_round: Callable[[int], dict[str, float]], json_path: Path | None) -> list[Any]:
    """The results of all rounds. Each is saved when it ends, and a later run does only those that are missing.

    Rounds of another commit or of other options measured something else: they are not taken over.
    """
    if json_path is None:
        return [run_round(number) for number in range(num_rounds)]
    saved, of = json_path.with_suffix(".rounds"), {"commit": commit(), "options": sys.argv[1:]}
    rounds = _saved_rounds(saved, of)
    for number in range(len(rounds), num_rounds):
        rounds.append(run_round(number))
        written = saved.with_suffix(".writing")
        written.write_text(json.dumps({"of": of, "rounds": rounds}))
        written.replace(saved)
    return rounds


def _saved_rounds(saved: Path, of: dict[str, Any]) -> list[Any]:
    if not saved.exists():
        return []
    found: dict[str, Any] = json.loads(saved.read_text())
    if found["of"] != of:
        print(f"{saved} has rounds of {found['of']}: starting anew")
        return []
    rounds: list[Any] = found["rounds"]
    return rounds


def finish(name: str, rows: Sequence[Row], json_path: Path | None) -> None:
    """Prints the rows, and writes them with machine and commit when a file is wanted."""
    for row in rows:
        ratio = "" if row.ratio is None else f", {row.ratio:.2f} x {row.against}"
        spread = "" if row.low is None or row.high is None else f" [{row.low:.3g}, {row.high:.3g}]"
        goal = "" if row.goal is None else f" (goal: {row.goal}: {'met' if row.met else 'missed'})"
        print(f"{row.case}: {row.value:.4g} {row.unit}{spread}{ratio}{goal}")
    if json_path is None:
        return
    body = {"name": name, "machine": machine(), "commit": commit(), "rows": [asdict(r) for r in rows]}
    json_path.write_text(json.dumps(body, indent=1) + "\n")
    json_path.with_suffix(".rounds").unlink(missing_ok=True)


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    model = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model[0].split(":", 1)[1].strip() if model else platform.machine(),
        "num_cpus": os.cpu_count(),
        "memory_bytes": memory_bytes,
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def commit() -> str:
    """The checkout's commit, or ``unknown`` outside of one."""
    try:
        ended = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return ended.stdout.strip()
