"""Records of a replica: what its ring dropped spoils only the windows that it may have been in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trimtab.controller.backends.local import LocalBackend, ModelOnDisk, Place
from trimtab.controller.cores import CoreSets
from trimtab.controller.store.store import Store
from trimtab.controller.store.tables import ProcessRow
from trimtab.engine.adapters.interface import RecordPage
from trimtab.engine.contract import RequestOutcome, RequestRecord


class Ring:
    """The adapter and client of an engine whose pages are given."""

    def __init__(self) -> None:
        self.page = RecordPage((), 0, 0)

    def client(self, *_: object) -> Ring:
        return self

    async def records_since(self, _cursor: int) -> RecordPage:
        return self.page


def record(finished_unix_s: float) -> RequestRecord:
    shape: dict[str, Any] = {"outcome": RequestOutcome.SUCCEEDED, "prompt_tokens": 1, "output_tokens": 1}
    none = dict.fromkeys(("queue_s", "ttft_s", "tpot_s", "max_itl_s", "mean_batch_size", "mean_step_s"))
    return RequestRecord(
        sequence=1,
        request_id="r",
        arrival_unix_s=0.0,
        finished_unix_s=finished_unix_s,
        duration_s=1.0,
        **shape,
        **none,
    )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(tmp_path)
    values = {"pid": 1, "start_ticks": 1, "nonce": "n", "log_path": "", "cpus": [], "started_unix_s": 0.0}
    texts = dict.fromkeys(("label", "base_url", "admin_url", "admin_token", "model"), "")
    with opened.write() as session:
        session.add(ProcessRow(role="replica", configuration={}, inject=None, **values, **texts))
    yield opened
    opened.close()


async def test_dropped_records_spoil_the_windows_before_them_and_no_later_one(store: Store, tmp_path: Path) -> None:
    ring = Ring()
    place = Place(ModelOnDisk(tmp_path, "m"), CoreSets(((0,),), None, (), None), tmp_path)
    backend = LocalBackend(store, ring, SimpleNamespace(), place)  # type: ignore[arg-type]
    ring.page = RecordPage((record(10.0),), 1, 0)
    assert await backend.records(1, 5.0) == [record(10.0)]
    ring.page = RecordPage((record(20.0),), 9, 7)
    assert await backend.records(1, 5.0) is None
    ring.page = RecordPage((record(40.0),), 10, 0)
    assert await backend.records(1, 5.0) is None
    assert await backend.records(1, 30.0) == [record(40.0), record(40.0)]
