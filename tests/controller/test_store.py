"""The state store: migrated, append-only where it must be, and honest about tampering."""

import contextlib
import random
import sqlite3
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, select
from sqlalchemy.exc import IntegrityError

from trimtab.controller.store.decisions import DecisionNote
from trimtab.controller.store.store import Store
from trimtab.controller.store.tables import Base, DecisionRow
from trimtab.errors import StoreError


def note(sentence: str) -> DecisionNote:
    return DecisionNote("person", "rollout 1", "started", sentence, {"x": 1.5})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = Store.open(tmp_path)
    for index in range(3):
        with store.write(note(f"decision {index}")):
            pass
    store.close()
    return tmp_path


def test_a_reopened_store_keeps_its_decisions(folder: Path) -> None:
    store = Store.open(folder)
    assert store.verify() == 3
    with store.read() as session:
        assert [d.sentence for d in session.scalars(select(DecisionRow))] == [f"decision {i}" for i in range(3)]
    store.close()


def test_the_migrations_build_the_declared_tables(folder: Path) -> None:
    engine = create_engine(f"sqlite:///{folder / 'state.db'}")
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
    engine.dispose()


def test_a_failed_transaction_leaves_neither_change_nor_decision(folder: Path) -> None:
    store = Store.open(folder)
    with pytest.raises(RuntimeError), store.write(note("never")):
        raise RuntimeError
    assert store.verify() == 3
    store.close()


@pytest.mark.parametrize("statement", ["DELETE FROM decisions", "UPDATE decisions SET sentence = 'other'"])
def test_decisions_cannot_be_changed(folder: Path, statement: str) -> None:
    store = Store.open(folder)
    with pytest.raises(IntegrityError, match="append-only"), store.write() as session:
        session.connection().exec_driver_sql(statement)
    store.close()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE decisions SET inputs = '{\"x\": 2.5}' WHERE sequence = 2",
        "DELETE FROM decisions WHERE sequence = 2",
        "DELETE FROM decisions WHERE sequence = 3",  # cut at the end: only the anchor shows it
        "DELETE FROM decisions",
    ],
)
def test_tampering_behind_the_triggers_is_found(folder: Path, statement: str) -> None:
    with sqlite3.connect(folder / "state.db") as connection:
        connection.execute("DROP TRIGGER decisions_no_update")
        connection.execute("DROP TRIGGER decisions_no_delete")
        connection.execute(statement)
    connection.close()
    with pytest.raises(StoreError, match="decision log"):
        Store.open(folder)


def test_an_anchor_that_lags_by_a_kill_is_accepted(folder: Path) -> None:
    store = Store.open(folder)
    before = (folder / "decisions.head").read_text()
    with store.write(note("the fourth")):
        pass
    store.close()
    (folder / "decisions.head").write_text(before)
    reopened = Store.open(folder)
    assert reopened.verify() == 4
    reopened.close()


def test_what_is_no_database_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "state.db").write_bytes(b"not a database, but long enough to be read as a header" * 10)
    with pytest.raises(StoreError, match=r"state\.db cannot be opened"):
        Store.open(tmp_path)


def test_a_home_that_cannot_be_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for home in (tmp_path / "file", Path("/proc/none")):
        with pytest.raises(StoreError, match="choose another TRIMTAB_HOME"):
            Store.open(home)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", "² abc".encode(), b"4 abc", b"-1 abc", b"9" * 5000, None])
def test_a_damaged_head_is_one_clear_error(folder: Path, content: bytes | None) -> None:
    head = folder / "decisions.head"
    head.unlink()
    if content is None:
        head.mkdir()
    else:
        head.write_bytes(content)
    with pytest.raises(StoreError, match=r"decisions\.head"):
        Store.open(folder)


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("UPDATE decisions SET inputs = '{' WHERE sequence = 2", "cannot be read"),
        ("UPDATE alembic_version SET version_num = '9999'", "newer than this one"),
    ],
)
def test_a_damaged_or_newer_database_is_one_clear_error(folder: Path, statement: str, told: str) -> None:
    with sqlite3.connect(folder / "state.db") as connection:
        connection.execute("DROP TRIGGER decisions_no_update")
        connection.execute(statement)
    connection.close()
    with pytest.raises(StoreError, match=told):
        Store.open(folder)


@pytest.mark.parametrize("seed", range(6))
def test_flipped_bytes_never_crash(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    path = folder / "state.db"
    data = bytearray(path.read_bytes())
    for _ in range(400):
        data[rng.randrange(100, len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    with contextlib.suppress(StoreError):  # or it opens: some flips are where nothing is
        Store.open(folder).close()


def test_the_file_is_its_owner_s_only(folder: Path) -> None:
    assert (folder / "state.db").stat().st_mode & 0o077 == 0
