"""The append-only, hash-chained decision log, and its head outside the database.

Each row's hash covers its content and the row before it, so a change anywhere breaks every later hash. The head is
also written to a file beside the database: a log that was cut off at its end no longer matches it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from trimtab.controller.store.tables import DecisionRow
from trimtab.errors import StoreError

GENESIS = "0" * 64
_MAX_ANCHOR_BYTES = 256


@dataclass(frozen=True, slots=True)
class DecisionNote:
    """What was decided, by whom, about what, and with which inputs."""

    actor: str
    subject: str
    kind: str
    sentence: str
    inputs: Mapping[str, Any] = field(default_factory=dict)


def append(session: Session, note: DecisionNote, at_unix_s: float) -> DecisionRow:
    """Adds ``note`` to the chain inside the caller's transaction."""
    last = session.scalars(select(DecisionRow).order_by(DecisionRow.sequence.desc()).limit(1)).first()
    row = DecisionRow(
        sequence=1 if last is None else last.sequence + 1,
        at_unix_s=at_unix_s,
        actor=note.actor,
        subject=note.subject,
        kind=note.kind,
        sentence=note.sentence,
        inputs=json.loads(json.dumps(dict(note.inputs), default=str)),
        previous_hash=GENESIS if last is None else last.hash,
    )
    row.hash = row_hash(row)
    session.add(row)
    session.flush()
    return row


def row_hash(row: DecisionRow) -> str:
    """SHA-256 over the row's canonical JSON, its own hash left out."""
    content = {
        "sequence": row.sequence,
        "at_unix_s": row.at_unix_s,
        "actor": row.actor,
        "subject": row.subject,
        "kind": row.kind,
        "sentence": row.sentence,
        "inputs": row.inputs,
        "previous_hash": row.previous_hash,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_anchor(path: Path, row: DecisionRow) -> None:
    """Writes the chain's head beside the database, atomically and to the disk: an empty one would read as a cut."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as anchor:
        anchor.write(f"{row.sequence} {row.hash}\n")
        anchor.flush()
        os.fsync(anchor.fileno())
    os.replace(temporary, path)


def verify(session: Session, anchor: Path) -> int:
    """Checks the whole chain against itself and the anchor; returns its length.

    The anchor may lag behind: a kill can fall between the commit and the anchor's write.

    Raises:
        StoreError: naming the first row that does not fit.
    """
    rows = session.scalars(select(DecisionRow).order_by(DecisionRow.sequence)).all()
    previous = GENESIS
    for expected, row in enumerate(rows, 1):
        if row.sequence != expected or row.previous_hash != previous or row.hash != row_hash(row):
            raise StoreError(f"the decision log does not fit its chain at decision {expected}")
        previous = row.hash
    if anchor.exists():
        try:
            text = anchor.read_bytes()[:_MAX_ANCHOR_BYTES].decode("ascii", errors="replace")
        except OSError as error:
            raise StoreError(f"{anchor} cannot be read: {error.strerror}") from error
        sequence, _, head = text.strip().partition(" ")
        if not sequence.isdecimal() or not 0 < int(sequence) <= len(rows) or rows[int(sequence) - 1].hash != head:
            raise StoreError(
                f"the decision log was cut or changed: {anchor} names decision {sequence!r}, which is not there"
            )
    return len(rows)
