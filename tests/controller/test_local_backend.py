"""Records of a replica, what its ring dropped, and a replica that hangs in the middle of being asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trimtab.controller.backends import local
from trimtab.controller.backends.interface import ReplicaState
from trimtab.controller.backends.local import LocalBackend, ModelOnDisk, Place
from trimtab.controller.cores import CoreSets
from trimtab.controller.store.store import Store
from trimtab.controller.store.tables import ProcessRow
from trimtab.engine.adapters.interface import DrainState, RecordPage
from trimtab.engine.contract import RequestOutcome, RequestRecord
from trimtab.errors import EngineCallError


class Ring:
    """The adapter and client of an engine whose pages are given. It is ready, and may hang when asked for more."""

    def __init__(self) -> None:
        self.page = RecordPage((), 0, 0)
        self.hangs = False

    def client(self, *_: object) -> Ring:
        return self

    async def is_ready(self) -> bool:
        return True

    async def drain_state(self) -> DrainState:
        self._answer()
        return DrainState(False, 0)

    async def records_since(self, _cursor: int) -> RecordPage:
        self._answer()
        return self.page

    def _answer(self) -> None:
        if self.hangs:
            raise EngineCallError("it hangs")


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


def backend_of(store: Store, ring: Ring, tmp_path: Path) -> LocalBackend:
    place = Place(ModelOnDisk(tmp_path, "m"), CoreSets(((0,),), None, (), None), tmp_path)
    return LocalBackend(store, ring, SimpleNamespace(), place)  # type: ignore[arg-type]


async def test_dropped_records_spoil_the_windows_before_them_and_no_later_one(store: Store, tmp_path: Path) -> None:
    ring = Ring()
    backend = backend_of(store, ring, tmp_path)
    ring.page = RecordPage((record(10.0),), 1, 0)
    assert await backend.records(1, 5.0) == [record(10.0)]
    ring.page = RecordPage((record(20.0),), 9, 7)
    assert await backend.records(1, 5.0) is None
    ring.page = RecordPage((record(40.0),), 10, 0)
    assert await backend.records(1, 5.0) is None
    assert await backend.records(1, 30.0) == [record(40.0), record(40.0)]


async def test_a_replica_that_hangs_after_its_probe_is_lost_as_soon_as_one_that_misses_it(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP may fall between any two calls: each that is not answered counts, and nothing more is asked then."""
    monkeypatch.setattr(local, "is_running", lambda _: True)
    ring = Ring()
    backend = backend_of(store, ring, tmp_path)
    assert (await backend.status(1)).num_in_flight == 0
    ring.hangs = True
    assert await backend.records(1, 0.0) is None
    second = await backend.status(1)
    assert second.state is ReplicaState.READY
    assert not second.answers
    assert (await backend.status(1)).state is ReplicaState.LOST
    ring.hangs = False
    assert (await backend.status(1)).answers
    ring.hangs = True
    assert (await backend.status(1)).state is ReplicaState.READY  # one answer begins the count anew
