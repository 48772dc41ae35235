"""``trimtab demo``: search, promote a winner under real traffic, catch a bad configuration, leave nothing behind.

It drives the same controller, API and manifests that everybody uses; only the fault in the second rollout is
injected, and labelled so wherever it is shown.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from trimtab.controller.backends.local import free_port
from trimtab.controller.cli.client import ApiClient
from trimtab.controller.cli.lifecycle import start_controller, stop_everything
from trimtab.controller.cli.output import knobs, say
from trimtab.controller.cli.rollout import follow, start_gated
from trimtab.controller.cli.tune import follow_experiment
from trimtab.controller.demo.report import Summary, demo_report, runner_up, summary
from trimtab.controller.demo.traffic import UserTraffic
from trimtab.controller.rollout.machine import Phase
from trimtab.controller.settings import Settings
from trimtab.controller.targets import read_manifests, target_and_policy
from trimtab.engine.registry import catalogues
from trimtab.errors import ExperimentError
from trimtab.experiments.result import ExperimentResult
from trimtab.policies.manifest import SyntheticWorkload

FAULT = "slow_decode=3"
WINNER_TIMEOUT_S = 30.0


def run_demo(where: Settings, report_file: Path) -> dict[str, Any]:
    """Runs the demo in a home of its own, writes ``report_file`` and returns its content.

    Raises:
        ExperimentError: the loop did not do what it should; the home with its logs is kept and named.
    """
    began_s = time.monotonic()
    home = Path(tempfile.mkdtemp(prefix="trimtab-demo-"))
    own = Settings(home, where.cache, prometheus_url=None)
    try:
        report = _run(own, began_s)
    except BaseException:
        stop_everything(own)
        say(f"the demo stopped early; logs and state are in {home}")
        raise
    report_file.write_text(json.dumps(report, indent=2) + "\n")
    shutil.copyfile(own.home / "experiments/experiment-1/report.md", report_file.with_suffix(".md"))
    shutil.rmtree(home)
    return report


def _run(where: Settings, began_s: float) -> dict[str, Any]:
    manifests = where.home / "manifests.yaml"
    shipped = resources.files("trimtab.controller.demo") / "manifests.yaml"
    manifests.write_text(shipped.read_text().replace("port: 18080", f"port: {free_port()}"))

    say("1/5 starting a target with a deliberately poor configuration: fp32, one request at a time")
    state = start_controller(where, [manifests])
    api = ApiClient(where)

    say("2/5 searching and confirming offline: engine on one core, load client on the other")
    result = _search(api)
    before, after = summary(result, result.incumbent), summary(result, result.winner or result.incumbent)

    say("3/5 the winner's canary, under users' traffic; stable, canary, baseline and client share the cores")
    _, policy = target_and_policy(read_manifests([manifests], catalogues()))
    assert isinstance(policy.spec.workload, SyntheticWorkload)
    target = state["target"]
    traffic = UserTraffic(target["url"], target["model"], policy.spec.workload, where.home / "traffic.json")
    traffic.start()
    try:
        promoted = _expect(follow(api, _first_rollout(api)), Phase.SUCCEEDED)
        say(f"4/5 a configuration that is good offline and bad live (injected fault: {FAULT})")
        rolled_back = _expect(follow(api, start_gated(api, _bad_knobs(result), FAULT)), Phase.ROLLED_BACK)
    finally:
        totals = traffic.stop()

    say("5/5 ending everything")
    stop_everything(where)
    report = demo_report(totals, before, after, [promoted, rolled_back], (time.monotonic() - began_s) / 60)
    if totals["failed"] or totals["lost"]:
        raise ExperimentError(f"requests were lost: {totals}")
    return report


def _search(api: ApiClient) -> ExperimentResult:
    experiment = follow_experiment(api, api.post("/experiments")["id"])
    result = ExperimentResult.from_json(json.dumps(experiment["result"]))
    say(result.sentence)
    if result.winner is None:
        raise ExperimentError(f"no configuration proved better than the poor incumbent: {result.sentence}")
    return result


def _first_rollout(api: ApiClient) -> int:
    """The rollout that the loop starts by itself for the winner."""
    deadline = time.monotonic() + WINNER_TIMEOUT_S
    while not (rollouts := api.get("/rollouts")):
        if time.monotonic() > deadline:
            raise ExperimentError("the loop started no rollout for the winner")
        time.sleep(0.2)
    rollout_id: int = rollouts[0]["id"]
    return rollout_id


def _bad_knobs(result: ExperimentResult) -> dict[str, Any]:
    """The knobs of a configuration that is good offline, so that only living traffic can catch it."""
    other = runner_up(result)
    if other is not None:
        return dict(other)
    # A short search may leave only its winner; a small live change of it goes through the gate like any other.
    assert result.winner is not None
    chunk = int(result.winner["prefill_chunk_tokens"])
    return {**result.winner, "prefill_chunk_tokens": chunk // 2 if chunk >= 64 else chunk * 2}


def _expect(rollout: dict[str, Any], phase: Phase) -> dict[str, Any]:
    if rollout["phase"] != phase:
        raise ExperimentError(f"rollout {rollout['id']} ended {rollout['phase']}, not {phase}: {rollout['sentence']}")
    return rollout


def told(report: dict[str, Any]) -> Sequence[str]:
    """The demo's outcome in a few lines."""
    requests, rollouts = report["requests"], report["rollouts"]
    before, after = Summary(**report["before"]), Summary(**report["after"])
    return (
        f"{'':10}{'TTFT p95':>12}{'TPOT p95':>12}{'goodput':>12}{'KL':>10}  what differs",
        _row("before", before, after),
        _row("after", after, before),
        f"promoted:    {rollouts[0]['sentence']}",
        f"rolled back: {rollouts[1]['sentence']}",
        f"requests:    {', '.join(f'{count} {name}' for name, count in requests.items())}",
        f"minutes:     {report['minutes']:.1f}",
    )


def _row(name: str, seen: Summary, other: Summary) -> str:
    differing = {knob: value for knob, value in seen.knobs.items() if other.knobs.get(knob) != value}
    cells = (
        _cell(seen.ttft_p95_s, 1000, "ms", 0),
        _cell(seen.tpot_p95_s, 1000, "ms", 1),
        _cell(seen.goodput_per_s, 1, "/s", 2),
    )
    return f"{name:10}{''.join(cells)}{_cell(seen.kl_nats, 1, '', 4)[2:]}  {knobs(differing)}"


def _cell(value: float | None, factor: float, unit: str, digits: int) -> str:
    text = "none" if value is None else f"{value * factor:.{digits}f} {unit}".strip()
    return f"{text:>12}"
