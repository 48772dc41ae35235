"""Available memory is the machine's or the control group's, whichever is less."""

from pathlib import Path

import psutil
import pytest

from trimtab.engine.embedded.memory import available_bytes


@pytest.mark.parametrize(
    ("limit", "used", "cached", "expected"),
    [("3000", "1000", "0", 2000), ("1000", "3000", "0", 0), ("3000", "2900", "2500", 2600)],
)
def test_the_control_groups_limit_counts_without_idle_file_pages(
    tmp_path: Path, limit: str, used: str, cached: str, expected: int
) -> None:
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text(used + "\n")
    assert available_bytes(tmp_path) == expected


def test_without_a_limit_it_is_the_machines(tmp_path: Path) -> None:
    machine_bytes = psutil.virtual_memory().available
    # Others allocate and free meanwhile.
    assert available_bytes(tmp_path) == pytest.approx(machine_bytes, rel=0.2)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5\n")
    (tmp_path / "memory.stat").write_text("inactive_file 0\n")
    assert available_bytes(tmp_path) == pytest.approx(machine_bytes, rel=0.2)
