"""Opens the state store and hands out transactions. SQLite in WAL mode; one controller writes, others may read."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.exc import DatabaseError
from sqlalchemy.orm import Session, sessionmaker

from trimtab.controller.store import decisions
from trimtab.controller.store.decisions import DecisionNote
from trimtab.errors import StoreError


class Store:
    """The controller's memory. Every write that changes what is served carries its decision."""

    def __init__(self, engine: Engine, anchor: Path, clock: Callable[[], float]) -> None:
        self._sessions = sessionmaker(engine, expire_on_commit=False)
        self._engine = engine
        self._anchor = anchor
        self._clock = clock

    @classmethod
    def open(cls, folder: Path, clock: Callable[[], float] = time.time) -> Store:
        """Opens ``folder``/state.db, migrates it and verifies the decision log.

        Raises:
            StoreError: the file is no database, damaged or newer, or the log does not fit its chain.
        """
        path = folder / "state.db"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.touch(mode=0o600)
            os.chmod(path, 0o600)
        except OSError as error:
            raise StoreError(f"{path} cannot be written: {error.strerror}; choose another TRIMTAB_HOME") from error
        engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": 30})
        event.listen(engine, "connect", _set_pragmas)
        store = cls(engine, folder / "decisions.head", clock)
        try:
            with engine.begin() as connection:
                config = Config()
                config.set_main_option("script_location", "trimtab.controller.store:migrations")
                config.set_main_option("path_separator", "os")
                config.attributes["connection"] = connection
                command.upgrade(config, "head")
            store.verify()
        except DatabaseError as error:
            raise StoreError(f"{path} cannot be opened: {error.orig}; move it away to start anew") from error
        except CommandError as error:
            raise StoreError(f"{path} is another Trimtab's, newer than this one: {error}") from error
        except ValueError as error:  # a damaged page can leave JSON that is none
            raise StoreError(f"{path} cannot be read: {error}; move it away to start anew") from error
        return store

    def close(self) -> None:
        self._engine.dispose()

    def now(self) -> float:
        """Unix seconds by the store's clock."""
        return self._clock()

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session for reading; what it loads stays usable afterwards."""
        with self._sessions() as session:
            yield session

    @contextmanager
    def write(self, note: DecisionNote | None = None) -> Iterator[Session]:
        """One transaction. With ``note``, the decision is part of it, and the chain's head is anchored after it."""
        with self._sessions.begin() as session:
            yield session
            row = decisions.append(session, note, self._clock()) if note else None
        if row is not None:
            decisions.write_anchor(self._anchor, row)

    def verify(self) -> int:
        """The number of decisions, all of which fit the chain. Raises ``StoreError`` otherwise."""
        with self.read() as session:
            return decisions.verify(session, self._anchor)


def _set_pragmas(connection: Any, _record: object) -> None:
    for pragma in ("journal_mode=WAL", "foreign_keys=ON", "busy_timeout=30000"):
        connection.execute(f"PRAGMA {pragma}")
