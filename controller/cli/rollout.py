"""``trimtab rollout``: list, follow and steer rollouts."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from trimtab.controller.cli.client import ApiClient
from trimtab.controller.cli.knob_options import parse_knobs
from trimtab.controller.cli.output import on_interrupt, print_json, say, table
from trimtab.controller.settings import settings
from trimtab.errors import RolloutError

app = typer.Typer(no_args_is_help=True, help="List, follow and steer rollouts.")
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
RolloutId = Annotated[int | None, typer.Argument(help="The rollout's number; the latest when left out.")]
EXIT_ROLLED_BACK, EXIT_UNDER_WAY = 3, 4
POLL_S = 0.5
TELL_PERIOD_S = 15.0


@app.command("list")
def list_rollouts(as_json: Json = False) -> None:
    """Lists every rollout of this home, oldest first."""
    rollouts = ApiClient(settings()).get("/rollouts")
    if as_json:
        print_json(rollouts)
        return
    rows = [
        [r["id"], r["phase"], f"{r['step']}/{r['num_steps']}", r["configuration_id"], r["sentence"]] for r in rollouts
    ]
    table(["ID", "PHASE", "STEP", "CONFIGURATION", "WHY"], rows)


@app.command()
def status(rollout_id: RolloutId = None, as_json: Json = False) -> None:
    """Prints one rollout; exits with 0 when it succeeded, 3 when it was rolled back, 4 while it is under way."""
    rollout = _get(ApiClient(settings()), rollout_id)
    if as_json:
        print_json(rollout)
    else:
        print(_line(rollout))
        for check in (rollout["verdict"] or {}).get("checks", []):
            print(f"  {check['metric']}: {check['result']}: {check['reason']}")
    raise typer.Exit(_exit_code(rollout))


@app.command()
def watch(rollout_id: RolloutId = None) -> None:
    """Follows a rollout to its end; the exit code is that of `status`."""
    with on_interrupt("the rollout goes on in the controller; see `trimtab rollout status`"):
        rollout = follow(ApiClient(settings()), rollout_id)
    raise typer.Exit(_exit_code(rollout))


@app.command()
def start(
    knob: Annotated[list[str], typer.Option("--set", help="KNOB=VALUE on top of stable; may be repeated.")],
    inject: Annotated[
        str | None, typer.Option(help="A labelled fault for the canary, to see it caught: slow_decode=3.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Checks a configuration offline, then starts its rollout."""
    api = ApiClient(settings())
    rollout_id = start_gated(api, parse_knobs(knob), inject)
    if as_json:
        print_json(_get(api, rollout_id))
    else:
        say(f"rollout {rollout_id} started; follow it with `trimtab rollout watch {rollout_id}`")


@app.command()
def pause(rollout_id: RolloutId = None) -> None:
    """Holds the weight; a canary that does harm is still rolled back."""
    _command(rollout_id, "pause")


@app.command()
def resume(rollout_id: RolloutId = None) -> None:
    """Lets the judge move a paused rollout again."""
    _command(rollout_id, "resume")


@app.command()
def promote(rollout_id: RolloutId = None) -> None:
    """Leaves the present step without waiting for the judge."""
    _command(rollout_id, "promote")


@app.command()
def abort(rollout_id: RolloutId = None) -> None:
    """Rolls back now."""
    _command(rollout_id, "abort")


def start_gated(api: ApiClient, knobs: dict[str, Any], inject: str | None) -> int:
    """Runs the offline gate unless it has passed already, then starts the rollout and returns its id.

    Raises:
        RolloutError: the gate failed; the message has the reasons.
    """
    configuration_id = api.post("/gates", {"knobs": knobs})["configuration_id"]
    say(f"checking configuration {configuration_id} offline (memory, quality, SLOs); about a minute")
    while (gate := api.get(f"/gates/{configuration_id}"))["state"] == "running":
        time.sleep(POLL_S)
    if gate["state"] != "passed":
        reason = gate.get("detail", {}).get("reason", "the check did not finish; see `trimtab logs`")
        raise RolloutError(f"configuration {configuration_id} did not pass the offline gate: {reason}")
    started: int = api.post("/rollouts", {"knobs": knobs, "inject": inject})["id"]
    return started


def follow(api: ApiClient, rollout_id: int | None) -> dict[str, Any]:
    """Tells a rollout until it ends, and returns it: every change of state, and a new look now and then."""
    rollout = _get(api, rollout_id)
    place, line, told_at_s = "", "", 0.0
    while True:
        new_place, new_line = f"{rollout['phase']} {rollout['step']} {rollout['paused']}", _line(rollout)
        if new_place != place or (new_line != line and time.monotonic() - told_at_s >= TELL_PERIOD_S):
            say(new_line)
            place, line, told_at_s = new_place, new_line, time.monotonic()
        if rollout["ended_unix_s"] is not None:
            return rollout
        time.sleep(POLL_S)
        rollout = _get(api, rollout["id"])


def _command(rollout_id: int | None, verb: str) -> None:
    api = ApiClient(settings())
    rollout = _get(api, rollout_id)
    api.post(f"/rollouts/{rollout['id']}/{verb}")
    say(f"asked to {verb} rollout {rollout['id']}")


def _get(api: ApiClient, rollout_id: int | None) -> dict[str, Any]:
    if rollout_id is not None:
        found: dict[str, Any] = api.get(f"/rollouts/{rollout_id}")
        return found
    rollouts: list[dict[str, Any]] = api.get("/rollouts")
    if not rollouts:
        raise RolloutError("there is no rollout yet; a search's winner or `trimtab rollout start` makes one")
    return rollouts[-1]


def _line(rollout: dict[str, Any]) -> str:
    weights = ", ".join(f"{arm} {weight} %" for arm, weight in rollout["weights"].items() if weight)
    paused = ", paused" if rollout["paused"] else ""
    return (
        f"rollout {rollout['id']}: {rollout['phase']}{paused}, step {rollout['step']} of {rollout['num_steps']}"
        f" ({weights}). {rollout['sentence']}"
    )


def _exit_code(rollout: dict[str, Any]) -> int:
    if rollout["ended_unix_s"] is None:
        return EXIT_UNDER_WAY
    return 0 if rollout["phase"] == "succeeded" else EXIT_ROLLED_BACK
