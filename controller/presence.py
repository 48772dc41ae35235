"""Where the running controller is: one lock, one file. The command line finds it here."""

from __future__ import annotations

import fcntl
import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from trimtab.errors import ControllerError

# struct flock (fcntl(2)): type, whence, start, length (0: to the end), pid (0 for locks of an open file description).
_FLOCK = "hhqqi"
_WHOLE_FILE = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Presence:
    """A running controller: its process and its API."""

    pid: int
    start_ticks: int  # with the nonce, names the process beyond doubt (engine.process)
    nonce: str
    url: str
    token: str


@contextmanager
def sole_controller(home: Path) -> Iterator[None]:
    """Holds the home's lock. Raises ``ControllerError`` while another process does; a kill releases it."""
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        opened = (home / "controller.lock").open("a")
    except OSError as error:
        raise ControllerError(f"{home} cannot be used: {error.strerror}; choose another TRIMTAB_HOME") from error
    with opened as lock:
        try:
            fcntl.fcntl(lock, fcntl.F_OFD_SETLK, _WHOLE_FILE)
        except BlockingIOError as error:
            raise ControllerError(f"a controller or a search already runs in {home}; see `trimtab status`") from error
        (home / "controller.json").unlink(missing_ok=True)  # a killed one's
        yield


def is_present(home: Path) -> bool:
    """Whether some process holds the home's lock. Asks without taking it, so that nobody is kept from starting."""
    path = home / "controller.lock"
    if not path.exists():
        return False
    with path.open("rb") as lock:
        found = fcntl.fcntl(lock, fcntl.F_OFD_GETLK, _WHOLE_FILE)
    kind, *_ = struct.unpack(_FLOCK, found)
    return bool(kind != fcntl.F_UNLCK)


def announce(home: Path, presence: Presence) -> None:
    """Writes the file that the command line reads, for its owner only."""
    path = home / "controller.json"
    temporary = path.with_suffix(".tmp")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(asdict(presence), file)
    os.replace(temporary, path)


def find(home: Path) -> Presence:
    """The running controller. Raises ``ControllerError`` when there is none, or none that can be talked to."""
    path = home / "controller.json"
    if not is_present(home):
        raise ControllerError(f"no controller runs in {home}; start one with `trimtab up`")
    try:
        return Presence(**json.loads(path.read_text()))
    except FileNotFoundError as error:
        told = f"a search runs in {home}, or a controller that is not up yet; wait for it, or interrupt it there"
        raise ControllerError(told) from error
    except (OSError, ValueError, TypeError) as error:
        raise ControllerError(f"{path} cannot be read: {error}; end the controller by its id (see `ps`)") from error
