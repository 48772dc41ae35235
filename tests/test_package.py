"""What is shipped: whole, under one name, light where it must be, with every error in the one tree."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import trimtab
from trimtab.errors import TrimtabError

ROOT = Path(__file__).parents[1]
ROOMS = ("controller", "engine", "experiments", "kernels", "policies")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The file names in the wheel and in the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel, tarfile.open(next(folder.glob("*.tar.gz"))) as sdist:
        return {"wheel": set(wheel.namelist()), "sdist": {n.split("/", 1)[1] for n in sdist.getnames()}}


def sources() -> set[str]:
    listed = subprocess.run(["git", "ls-files", *ROOMS], cwd=ROOT, check=True, capture_output=True, text=True)
    return set(listed.stdout.split())


def test_wheel_and_source_distribution_hold_every_room_once(built: dict[str, set[str]]) -> None:
    assert sources() <= built["sdist"]
    assert {f"trimtab/{name}" for name in sources()} <= built["wheel"]
    strays = {
        n for n in built["wheel"] if not n.startswith(("trimtab/", f"trimtab-{trimtab.__version__}.dist-info/"))
    }
    assert strays == set()
    assert not [n for n in built["wheel"] | built["sdist"] if "__pycache__" in n or n.startswith("tests/")]


@pytest.mark.parametrize("room", ROOMS)
def test_no_room_can_be_imported_without_the_package(room: str, tmp_path: Path) -> None:
    code = f"import importlib.util as u, sys; s = u.find_spec('{room}'); sys.exit(s is not None)"
    assert subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, check=False).returncode == 0


def test_the_control_plane_runs_without_torch() -> None:
    code = (
        "import sys, trimtab.controller.wiring, trimtab.controller.cli.main, trimtab.experiments.experiment\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def modules() -> Iterator[str]:
    for found in pkgutil.walk_packages(trimtab.__path__, "trimtab."):
        if not found.name.endswith(("__main__", "migrations.env")):  # these two act when they are imported
            yield found.name


def test_every_error_that_is_raised_on_purpose_is_in_the_tree() -> None:
    defined = {
        value
        for name in modules()
        for value in vars(importlib.import_module(name)).values()
        if isinstance(value, type) and issubclass(value, Exception) and value.__module__.startswith("trimtab.")
    }
    assert len(defined) > 10
    # A leading underscore marks what never leaves its module.
    assert {e for e in defined if not issubclass(e, TrimtabError) and not e.__name__.startswith("_")} == set()
