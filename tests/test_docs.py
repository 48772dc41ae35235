"""The reference pages say what the code does, and every relative link in the documentation leads somewhere."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "experiments").rglob("*.md")])


def test_the_reference_is_current() -> None:
    written = runpy.run_path(str(ROOT / "docs/generate.py"))["pages"]()
    folder = ROOT / "docs/reference"
    assert {path.name: path.read_text() for path in folder.iterdir()} == written, "run `python docs/generate.py`"


def test_nothing_in_the_reference_lacks_a_meaning() -> None:
    for path in (ROOT / "docs/reference").iterdir():
        rows = [line for line in path.read_text().splitlines() if line.startswith("| `")]
        assert rows
        assert [r for r in rows if r.rsplit("|", 2)[1].strip() in ("", "None")] == [], path.name


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", re.sub(r"`[^`]*`", "", page.read_text()))
    local = [link for link in links if not link.startswith(("http://", "https://"))]
    assert [link for link in local if not (page.parent / link).exists()] == []


def test_the_figures_shown_are_those_of_the_benchmarks() -> None:
    figures = runpy.run_path(str(ROOT / "docs/generate.py"))["figures"]()
    assert {path: path.read_text() for path in figures} == figures, "run `python docs/generate.py`"
