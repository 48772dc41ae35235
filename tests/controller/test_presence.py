"""Where the running controller is found, and that there is never more than one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trimtab.controller.presence import Presence, announce, find, is_present, sole_controller
from trimtab.errors import ControllerError

HERE = Presence(1, 2, "nonce", "http://127.0.0.1:1", "secret")


def test_an_empty_home_has_no_controller(tmp_path: Path) -> None:
    assert not is_present(tmp_path / "home")
    with pytest.raises(ControllerError, match="trimtab up"):
        find(tmp_path / "home")


def test_a_running_controller_is_found_and_its_secret_is_the_owner_s(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with sole_controller(home):
        announce(home, HERE)
        assert find(home) == HERE
        assert (home / "controller.json").stat().st_mode & 0o777 == 0o600
        assert home.stat().st_mode & 0o777 == 0o700


def test_a_controller_that_ended_is_not_found(tmp_path: Path) -> None:
    with sole_controller(tmp_path):
        announce(tmp_path, HERE)
    with pytest.raises(ControllerError, match="no controller runs"):
        find(tmp_path)


def test_one_that_has_not_announced_itself_is_not_mistaken_for_a_killed_one(tmp_path: Path) -> None:
    announce(tmp_path, HERE)  # what a killed controller left behind
    with sole_controller(tmp_path):
        assert is_present(tmp_path)
        with pytest.raises(ControllerError, match="or a controller that is not up yet"):
            find(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[1]", "null", '{"pid": 1}', "\udcff"])
def test_a_damaged_announcement_is_one_clear_error(tmp_path: Path, content: str) -> None:
    with sole_controller(tmp_path):
        (tmp_path / "controller.json").write_text(content, errors="surrogateescape")
        with pytest.raises(ControllerError, match=r"controller\.json cannot be read"):
            find(tmp_path)


def test_a_home_that_cannot_be_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for home in (tmp_path / "file", tmp_path / "file/home", Path("/proc/none")):
        with pytest.raises(ControllerError, match="choose another TRIMTAB_HOME"), sole_controller(home):
            pass


def test_a_second_controller_is_refused(tmp_path: Path) -> None:
    with sole_controller(tmp_path), pytest.raises(ControllerError, match="already runs"), sole_controller(tmp_path):
        pass


def test_a_kill_releases_the_home(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, trimtab.controller.presence as p\n"
        "with p.sole_controller(pathlib.Path(sys.argv[1])):\n    print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert is_present(tmp_path)
        holder.kill()
        holder.wait(10)
    assert not is_present(tmp_path)
    with sole_controller(tmp_path):
        assert is_present(tmp_path)


def test_looking_for_a_controller_never_keeps_one_from_starting(tmp_path: Path) -> None:
    with sole_controller(tmp_path):
        pass
    code = (
        "import sys, pathlib, trimtab.controller.presence as p\nprint('looking', flush=True)\n"
        "while True:\n    p.is_present(pathlib.Path(sys.argv[1]))"
    )
    with subprocess.Popen([sys.executable, "-P", "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as watcher:
        try:
            assert watcher.stdout is not None
            assert watcher.stdout.readline() == b"looking\n"
            for _ in range(2000):
                with sole_controller(tmp_path):
                    pass
        finally:
            watcher.kill()
