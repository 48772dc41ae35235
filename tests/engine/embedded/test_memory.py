"""Available memory is the machine's or the control group's, whichever is less."""

from pathlib import Path

import psutil
import pytest

from trimtab.engine.embedded.memory import available_bytes


@pytest.mark.parametrize(("limit", "used", "expected"), [("3000", "1000", 2000), ("1000", "3000", 0)])
def test_the_control_groups_limit_counts(tmp_path: Path, limit: str, used: str, expected: int) -> None:
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text(used + "\n")
    assert available_bytes(tmp_path) == expected


def test_without_a_limit_it_is_the_machines(tmp_path: Path) -> None:
    machine_bytes = psutil.virtual_memory().available
    # Others allocate and free meanwhile.
    assert available_bytes(tmp_path) == pytest.approx(machine_bytes, rel=0.2)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5\n")
    assert available_bytes(tmp_path) == pytest.approx(machine_bytes, rel=0.2)
