"""The offline gate: no configuration takes users' traffic that failed its memory, quality or SLO check.

The controller calls it before a rollout, for winners and for configurations that a person asks for alike.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass

import aiohttp

from trimtab.engine.contract import Configuration
from trimtab.experiments.load.client_process import LoadClient
from trimtab.experiments.plan import ExperimentPlan
from trimtab.experiments.ports import EngineHost
from trimtab.experiments.trial import TrialLoad, TrialOutcome, TrialRunner
from trimtab.policies.constraints import broken, describe


@dataclass(frozen=True, slots=True)
class GateResult:
    """``reasons`` is empty exactly when the configuration passed."""

    configuration: Configuration
    passed: bool
    reasons: tuple[str, ...]
    outcome: TrialOutcome

    @property
    def sentence(self) -> str:
        verdict = "passed" if self.passed else "failed"
        return f"{self.configuration.id} {verdict} the offline gate" + "".join(f"; {r}" for r in self.reasons) + "."


async def check_configuration(plan: ExperimentPlan, host: EngineHost, configuration: Configuration) -> GateResult:
    """Measures ``configuration`` once at the workload's own rate, on an engine of its own.

    Raises:
        ExperimentError: cores are shared against the policy, or the load client broke.
    """
    plan.refuse_silent_sharing()
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(LoadClient(plan.devices.client_cpus))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        runner = TrialRunner(plan, host, client, http)
        stack.push_async_callback(runner.close)
        load = TrialLoad(plan.workload, plan.policy.search.trial.duration, climbs_stairs=False)
        outcome = await runner.measure(configuration, load, label="offline gate", fresh=True)
    if outcome.failure is not None:
        failure = outcome.failure
        reasons: tuple[str, ...] = (f"{failure.kind} in phase {failure.phase}: {failure.message}",)
    else:
        reasons = tuple(describe(n, outcome.constraints[n]) for n in broken(outcome.constraints))
    return GateResult(configuration, not reasons, reasons, outcome)
