"""The proxy's process, with commands that end at once; ``test_envoy`` runs the real Envoy."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from types import SimpleNamespace

from sqlalchemy import select

from trimtab.controller.proxy import Proxy, running_processes
from trimtab.controller.store.store import Store
from trimtab.controller.store.tables import ProcessRow, TargetRow


def test_a_proxy_that_cannot_run_is_tried_less_and_less_often(tmp_path: Path) -> None:
    now_s = 1000.0
    store = Store.open(tmp_path, lambda: now_s)
    with store.write() as session:
        nothing = {key: {} for key in ("target_manifest", "policy_manifest", "stable_configuration")}
        session.add(TargetRow(name="chat", manifest_folder="/", **nothing))
    split = SimpleNamespace(command=lambda port: ["/bin/false"])
    proxy = Proxy(store, split, "chat", 8100, tmp_path)  # type: ignore[arg-type]
    for _ in range(200):
        proxy.ensure()
        while running_processes(store):
            time.sleep(0.005)
        now_s += 0.5
    with store.read() as session:
        started_s = [row.started_unix_s for row in session.scalars(select(ProcessRow).order_by(ProcessRow.id))]
    store.close()
    gaps_s = [later - sooner for sooner, later in itertools.pairwise(started_s)]
    assert gaps_s == sorted(gaps_s)
    assert 7 <= len(started_s) <= 9  # at once, then 1, 2, 4, 8, 16, 32 seconds apart
