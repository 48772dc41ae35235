"""One trial: engine, warm-up, quality, load, figures. The search, the confirmation and the gate all measure here.

An engine that runs is changed live where only live knobs differ, and replaced otherwise. Whatever goes wrong becomes
a ``TrialFailure`` whose kind comes from the phase and the exit code; only cancellation and a broken client leave as
exceptions.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

import aiohttp

from trimtab.engine.contract import ChangeCost, Configuration
from trimtab.errors import EngineCallError, EngineStartError
from trimtab.experiments import quality
from trimtab.experiments.load.client_process import LoadClient
from trimtab.experiments.load.figures import load_figures
from trimtab.experiments.load.result import LoadJob
from trimtab.experiments.memory import why_it_cannot_fit
from trimtab.experiments.plan import MIN_STEP_REQUESTS, ExperimentPlan
from trimtab.experiments.ports import EngineHost, HostedEngine
from trimtab.experiments.staircase import climb
from trimtab.experiments.workload.interface import Workload
from trimtab.policies.constraints import broken, quality_constraints, trial_constraints
from trimtab.policies.figures import LoadFigures, QualityFigures, TrialFigures

_WARMUP_SPLIT = 1_000_003  # warm-up traffic is held-out traffic that nothing else uses
_NO_RESTART = (None, ChangeCost.LIVE)
_MEASURE_ATTEMPTS = 2  # a client that lagged once gets one more chance


class Phase(StrEnum):
    CHECK = "check"
    START = "start"
    ALTER = "alter"
    QUALITY = "quality"
    LOAD = "load"


class FailureKind(StrEnum):
    MEMORY = "memory"  # refused by the memory check; no engine was started
    QUALITY = "quality"  # refused: these weights are known to break the quality floor
    OUT_OF_MEMORY = "out of memory"  # killed, as the kernel does when memory runs out
    CRASH = "crash"  # the engine ended by itself
    TIMEOUT = "timeout"  # alive and not ready in time
    CALL = "call"  # it answered wrongly or not at all
    CLIENT_LAG = "client lag"  # the load client was late: the figures would be about the client
    INTERRUPTED = "interrupted"  # Ctrl-C, or its process died; it is queued again


@dataclass(frozen=True, slots=True)
class TrialFailure:
    """Why a trial has no figures."""

    kind: FailureKind
    phase: Phase
    message: str


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """Exactly one of ``figures`` and ``failure`` is there.

    ``constraints`` is empty after a failure, but for weights that are known to break the quality floor.
    """

    configuration: Configuration
    figures: TrialFigures | None
    failure: TrialFailure | None
    constraints: dict[str, float]
    duration_s: float
    fresh_engine: bool  # whether an engine was started for it


@dataclass(frozen=True, slots=True)
class TrialLoad:
    """What a trial is put under. ``climbs_stairs``: goodput is looked for, within the same time."""

    workload: Workload
    duration_s: float
    climbs_stairs: bool


class _Failed(Exception):
    """Carries a failure out of a phase; never leaves this module."""

    def __init__(self, failure: TrialFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class TrialRunner:
    """Measures configurations one at a time on one host. ``close`` ends the engine that is left."""

    def __init__(
        self,
        plan: ExperimentPlan,
        host: EngineHost,
        client: LoadClient,
        http: aiohttp.ClientSession,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan = plan
        self._host = host
        self._client = client
        self._http = http
        self._now = now
        self._engine: HostedEngine | None = None
        self._qualities: dict[tuple[tuple[str, object], ...], QualityFigures] = {}
        self._started = False

    async def close(self) -> None:
        """Ends the engine that is kept between trials."""
        if self._engine is not None:
            await self._host.stop(self._engine)
            # Only now: when the stop is cancelled, the next call must find the engine still.
            self._engine = None

    async def measure(
        self, configuration: Configuration, load: TrialLoad, *, label: str, fresh: bool = False
    ) -> TrialOutcome:
        """Measures ``configuration`` under ``load``.

        Args:
            label: names the engine to the host.
            fresh: start a new engine even where a live change would do.
        """
        began_s, self._started = self._now(), False
        figures: TrialFigures | None = None
        failure: TrialFailure | None = None
        try:
            self._refuse_hopeless(configuration)
            await self._ensure_reference(configuration, label)
            engine = await self._engine_for(configuration, label, fresh)
            seen_quality = await self._quality_of(engine)
            figures = await self._load_until_valid(engine, load, seen_quality)
        except _Failed as failed:
            failure = failed.failure
            if failure.phase is not Phase.CHECK and failure.kind is not FailureKind.CLIENT_LAG:
                await self.close()
        policy = self._plan.policy
        constraints = trial_constraints(policy.slo, policy.quality, figures) if figures else {}
        return TrialOutcome(
            configuration, figures, failure, constraints, self._now() - began_s, fresh_engine=self._started
        )

    def change_cost(self, configuration: Configuration) -> ChangeCost | None:
        """What it costs to go to ``configuration`` from the engine that runs; a start when none does."""
        if self._engine is None:
            return ChangeCost.REQUANTIZE
        return self._plan.adapter.catalogue.change_cost(self._engine.configuration, configuration)

    def _refuse_hopeless(self, configuration: Configuration) -> None:
        reason = why_it_cannot_fit(configuration, self._plan.model, self._plan.devices.memory_bytes)
        if reason is not None:
            raise _Failed(TrialFailure(FailureKind.MEMORY, Phase.CHECK, reason))

    def broken_quality(self, configuration: Configuration) -> dict[str, float]:
        """The quality constraints of weights that were measured already and break the floor; else empty."""
        known = self._qualities.get(self._plan.quality_knobs(configuration))
        values = {} if known is None else quality_constraints(self._plan.policy.quality, known)
        return values if broken(values) else {}

    async def _ensure_reference(self, configuration: Configuration, label: str) -> None:
        """Measures and stores the reference once per model, on an engine of its own where need be."""
        plan = self._plan
        if quality.load_reference(plan.quality_folder, plan.reference_key) is not None:
            return
        same = plan.quality_knobs(configuration) == plan.quality_knobs(plan.reference)
        engine = (
            await self._engine_for(configuration, label, False)
            if same
            else await self._engine_for(plan.reference, "quality reference", False)
        )
        with self._failing(engine, Phase.QUALITY):
            scores = await quality.read_scores(self._http, engine.endpoint, self._pieces())
        quality.store_reference(plan.quality_folder, plan.reference_key, scores)

    async def _engine_for(self, configuration: Configuration, label: str, fresh: bool) -> HostedEngine:
        engine = self._engine
        alive = engine is not None and self._host.exit_code(engine) is None
        if engine is not None and alive and not fresh and self.change_cost(configuration) in _NO_RESTART:
            return await self._alter(engine, configuration)
        await self.close()
        try:
            self._engine = await self._host.start(configuration, label=label)
        except EngineStartError as error:
            kind = FailureKind.TIMEOUT if error.exit_code is None else self._kind_of_exit(error.exit_code)
            raise _Failed(TrialFailure(kind, Phase.START, str(error))) from error
        self._started = True
        return self._engine

    async def _alter(self, engine: HostedEngine, configuration: Configuration) -> HostedEngine:
        live = {name: configuration[name] for name in configuration.changed(engine.configuration)}
        if live:
            client = self._plan.adapter.client(self._http, engine.endpoint)
            with self._failing(engine, Phase.ALTER):
                await client.set_live_knobs(live)
        self._engine = HostedEngine(engine.endpoint, configuration, engine.id, engine.cpus)
        return self._engine

    async def _quality_of(self, engine: HostedEngine) -> QualityFigures:
        plan = self._plan
        knobs = plan.quality_knobs(engine.configuration)
        if knobs not in self._qualities:
            reference = quality.load_reference(plan.quality_folder, plan.reference_key)
            with self._failing(engine, Phase.QUALITY):
                if reference is None:
                    raise EngineCallError(f"the stored reference in {plan.quality_folder} is gone or damaged")
                scores = reference
                if knobs != plan.quality_knobs(plan.reference):
                    scores = await quality.read_scores(self._http, engine.endpoint, self._pieces())
                self._qualities[knobs] = quality.compare(reference, scores)
        return self._qualities[knobs]

    async def _load_until_valid(
        self, engine: HostedEngine, load: TrialLoad, seen_quality: QualityFigures
    ) -> TrialFigures:
        await self._warm_up(engine, load.workload)
        for attempt in range(_MEASURE_ATTEMPTS):
            try:
                return await self._load(engine, load, seen_quality)
            except _Failed as failed:
                if failed.failure.kind is not FailureKind.CLIENT_LAG or attempt == _MEASURE_ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _load(self, engine: HostedEngine, load: TrialLoad, seen_quality: QualityFigures) -> TrialFigures:
        workload, recorded_per_s = load.workload, load.workload.rate_per_s
        ratios = self._plan.limits.stair_ratios
        if not load.climbs_stairs:
            return TrialFigures(await self._step(engine, workload, load.duration_s), None, seen_quality)

        async def step(rate_per_s: float) -> LoadFigures:
            scaled = workload.at_rate(rate_per_s)
            return await self._step(engine, scaled, _step_duration_s(scaled, load.duration_s / len(ratios)))

        stairs = await climb(step, [ratio * recorded_per_s for ratio in ratios], self._plan.policy.slo)
        return TrialFigures(stairs.recorded, stairs.goodput_per_s, seen_quality, stairs.steps)

    async def _warm_up(self, engine: HostedEngine, workload: Workload) -> None:
        warmup_s = self._plan.policy.search.trial.warmup
        if warmup_s > 0:
            await self._client.run(self._job(engine, workload.held_out(_WARMUP_SPLIT), warmup_s))
        self._check_alive(engine)

    async def _step(self, engine: HostedEngine, workload: Workload, duration_s: float) -> LoadFigures:
        result = await self._client.run(self._job(engine, workload, duration_s))
        self._check_alive(engine)
        allowed_s = self._plan.limits.max_client_lag_s
        if result.lag_s > allowed_s:
            message = f"the client was {result.lag_s * 1000:.0f} ms late, {allowed_s * 1000:.0f} ms are allowed"
            raise _Failed(TrialFailure(FailureKind.CLIENT_LAG, Phase.LOAD, message))
        return load_figures(result)

    def _job(self, engine: HostedEngine, workload: Workload, duration_s: float) -> LoadJob:
        endpoint, drain_s = engine.endpoint, self._plan.limits.drain_s
        requests = workload.requests(duration_s)
        return LoadJob(endpoint.base_url, endpoint.model, requests, workload.rate_per_s, duration_s, drain_s)

    def _check_alive(self, engine: HostedEngine) -> None:
        exit_code = self._host.exit_code(engine)
        if exit_code is not None:
            message = f"the engine ended under load with exit code {exit_code}"
            raise _Failed(TrialFailure(self._kind_of_exit(exit_code), Phase.LOAD, message))

    @contextmanager
    def _failing(self, engine: HostedEngine, phase: Phase) -> Iterator[None]:
        """Turns an ``EngineCallError`` in its block into the failure of ``phase``."""
        try:
            yield
        except EngineCallError as error:
            exit_code = self._host.exit_code(engine)
            kind = FailureKind.CALL if exit_code is None else self._kind_of_exit(exit_code)
            raise _Failed(TrialFailure(kind, phase, str(error))) from error

    def _kind_of_exit(self, exit_code: int) -> FailureKind:
        """SIGKILL that nobody of ours sent is the kernel's answer to memory that ran out."""
        out_of_memory = (-signal.SIGKILL, 128 + signal.SIGKILL, *self._plan.adapter.memory_exit_codes)
        return FailureKind.OUT_OF_MEMORY if exit_code in out_of_memory else FailureKind.CRASH

    def _pieces(self) -> tuple[str, ...]:
        return quality.calibration_pieces(self._plan.limits.quality_pieces)


def _step_duration_s(workload: Workload, share_s: float) -> float:
    """``share_s``, or longer where fewer than ``MIN_STEP_REQUESTS`` would arrive: an empty step shows nothing."""
    horizon_s = share_s
    while len(requests := workload.requests(horizon_s)) <= MIN_STEP_REQUESTS:
        horizon_s *= 2
    return max(share_s, requests[MIN_STEP_REQUESTS].at_s)
