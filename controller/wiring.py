"""The composition root: builds one controller from its settings and manifests. Nothing else wires parts together."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from trimtab.controller.backends.local import LocalBackend, ModelOnDisk, Place, process_of
from trimtab.controller.backends.trial_host import TrialHost
from trimtab.controller.cores import CoreSets, core_sets
from trimtab.controller.loop import ControlLoop, LoopParts
from trimtab.controller.proxy import Proxy
from trimtab.controller.rollout.reconcile import Parts, Reconciler
from trimtab.controller.rollout.repository import Rollouts
from trimtab.controller.settings import Settings
from trimtab.controller.store.store import Store
from trimtab.controller.store.tables import ProcessRow
from trimtab.controller.targets import put_target, read_manifests, refuse_changed_service, target_and_policy
from trimtab.controller.telemetry.direct import DirectSource
from trimtab.controller.telemetry.prometheus import PrometheusSource, write_targets
from trimtab.controller.telemetry.source import MetricsSource
from trimtab.controller.traffic.envoy import EnvoySplit
from trimtab.controller.tuner import Tuner, TunerParts
from trimtab.engine import models
from trimtab.engine.adapters.interface import EngineAdapter
from trimtab.engine.process import is_running
from trimtab.engine.registry import adapter, catalogues
from trimtab.policies.manifest import TunedEngine, TuningPolicy

OBSERVED_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class Bench:
    """What a search needs, with or without a loop around it."""

    store: Store
    target: TunedEngine
    policy: TuningPolicy
    adapter: EngineAdapter
    backend: LocalBackend
    cores: CoreSets
    http: aiohttp.ClientSession
    tuner: Tuner


@asynccontextmanager
async def open_bench(where: Settings, files: Sequence[Path]) -> AsyncIterator[Bench]:
    """Everything up to the tuner. The caller holds the home's lock.

    Raises:
        TrimtabError: the manifests, the model or the store are not usable.
    """
    target, policy = target_and_policy(read_manifests(files, catalogues()))
    engine_adapter = adapter(target.spec.engine)
    cores = core_sets(sorted(os.sched_getaffinity(0)), target.spec.resources.cpus, share=policy.spec.share)
    model_path = models.resolve(target.spec.model, where.cache)
    store = Store.open(where.home)
    try:
        refuse_changed_service(store, target)
        put_target(store, target, policy, files[0].absolute().parent, engine_adapter.catalogue)
        async with aiohttp.ClientSession() as http:
            place = Place(ModelOnDisk(model_path, target.spec.model), cores, where.logs)
            backend = LocalBackend(store, engine_adapter, http, place)
            host = TrialHost(backend)
            await host.end_leftovers()
            tuner = Tuner(TunerParts(store, target.metadata.name, engine_adapter, host, cores, model_path, where))
            yield Bench(store, target, policy, engine_adapter, backend, cores, http, tuner)
    finally:
        store.close()


def build_loop(where: Settings, bench: Bench) -> ControlLoop:
    """The control loop around ``bench``."""
    name, spec = bench.target.metadata.name, bench.target.spec
    split = EnvoySplit(where.home / "envoy")
    proxy = Proxy(bench.store, split, name, spec.port, where.logs)
    rollouts = Rollouts(bench.store, name, bench.adapter.catalogue)
    parts = Parts(bench.store, bench.backend, split, rollouts, bench.adapter.catalogue, proxy.ensure)
    return ControlLoop(
        LoopParts(
            bench.store,
            name,
            bench.adapter.catalogue,
            Reconciler(parts, name),
            rollouts,
            bench.tuner,
            _metrics_source(where, bench),
            lambda: write_targets(where.home / "prometheus-targets.json", name, _serving_replicas(bench)),
        )
    )


def _metrics_source(where: Settings, bench: Bench) -> MetricsSource:
    name, names = bench.target.metadata.name, bench.adapter.metric_names
    if where.prometheus_url is not None:
        return PrometheusSource(where.prometheus_url, name, names, OBSERVED_WINDOW_S)

    def replicas() -> list[str]:
        return [f"http://{address}" for address in _serving_replicas(bench)]

    return DirectSource(bench.http, names, replicas, bench.store.now, OBSERVED_WINDOW_S)


def _serving_replicas(bench: Bench) -> dict[str, str]:
    """Maps the address of each live replica to its label."""
    found = {}
    for process_id, role in bench.backend.running().items():
        row: ProcessRow = bench.backend.row(process_id)
        if role == "replica" and is_running(process_of(row)):
            found[row.base_url.removeprefix("http://")] = row.label
    return found
