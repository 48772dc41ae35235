"""How much memory this process may still take: the machine's, or its control group's when that is less."""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUP_V2 = Path("/sys/fs/cgroup")


def available_bytes(cgroup: Path = CGROUP_V2) -> int:
    """The smaller of the machine's available memory and what the control group (v2) leaves; ``max`` is no limit.

    Pages of files that nobody used lately count as available, as in the machine's figure: the kernel gives them up
    before a group runs out, and reading a model leaves many.
    """
    machine_bytes = int(psutil.virtual_memory().available)
    try:
        limit, used = (cgroup / "memory.max").read_text().strip(), (cgroup / "memory.current").read_text().strip()
        figures = dict(line.split(" ", 1) for line in (cgroup / "memory.stat").read_text().splitlines())
    except OSError:
        return machine_bytes
    if not limit.isdigit() or not used.isdigit():
        return machine_bytes
    return max(0, min(machine_bytes, int(limit) - int(used) + int(figures.get("inactive_file", "0"))))
