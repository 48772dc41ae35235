"""``trimtab up``, ``down``, ``status`` and ``logs``: the controller's own life."""

from __future__ import annotations

import socket
import sys
import time
from collections import deque
from pathlib import Path
from typing import Annotated, Any

import typer

from trimtab.controller.cli.client import ApiClient
from trimtab.controller.cli.model import fetch_with_progress
from trimtab.controller.cli.output import knobs, print_json, say
from trimtab.controller.presence import find, is_present, sole_controller
from trimtab.controller.settings import Settings, settings
from trimtab.controller.targets import read_manifests, target_and_policy
from trimtab.engine import models
from trimtab.engine.process import ProcessRecord, ProcessSpec, is_running, spawn, terminate
from trimtab.engine.registry import catalogues
from trimtab.errors import ControllerError

START_TIMEOUT_S = 180.0
STOP_GRACE_S = 30.0
REPLICA_GRACE_S = 60.0
TELL_PERIOD_S = 15.0
POLL_S = 0.2
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Files = Annotated[list[Path], typer.Option("--file", "-f", help="A manifest file; may be repeated.")]


def add_to(app: typer.Typer) -> None:
    app.command("up")(up)
    app.command("down")(down)
    app.command("status")(status)
    app.command("logs")(logs)


def up(files: Files, as_json: Json = False) -> None:
    """Starts everything: the model, the stable replica, the traffic split, the controller and its console."""
    state = start_controller(settings(), files)
    if as_json:
        print_json(state)
        return
    say(f"serving {state['target']['model']} at {state['target']['url']}/v1")
    say("`trimtab status` has the console's link, `trimtab down` ends everything")


def start_controller(where: Settings, files: list[Path]) -> dict[str, Any]:
    """Starts the controller of ``where.home`` and waits until it serves; returns its state.

    Raises:
        ControllerError: one runs already, or it did not come up; the message has the end of its log.
    """
    target, _ = target_and_policy(read_manifests(files, catalogues()))
    if is_present(where.home):
        raise ControllerError(f"a controller or a search already runs in {where.home}; see `trimtab status`")
    adopts = _has_proxy(where)
    if not adopts:
        _refuse_taken_port(target.spec.port)
    if target.spec.model in {m.name for m in models.catalogue()}:
        fetch_with_progress(target.spec.model, where.cache)
    log_path = where.logs / "controller.log"
    argv = [sys.executable, "-m", "trimtab.controller"]
    for file in files:
        argv += ["--file", str(file.absolute())]
    env = {"TRIMTAB_HOME": str(where.home), "TRIMTAB_CACHE": str(where.cache)}
    made = spawn(ProcessSpec(tuple(argv), env, (), log_path), lambda _: None)
    say(f"starting the controller and the stable replica (log: {log_path})")
    try:
        return _wait_until_serving(where, made, log_path)
    except BaseException:  # an interrupted or failed start must not go on behind one's back
        terminate(made, STOP_GRACE_S)
        if not adopts:
            stop_everything(where)
        raise


def _refuse_taken_port(port: int) -> None:
    """Raises ``ControllerError`` when another program listens on ``port``."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            told = f"port {port} cannot be used ({error.strerror}); end the program that has it, or change spec.port"
            raise ControllerError(told) from error


def _has_proxy(where: Settings) -> bool:
    """Whether the Envoy of an earlier controller of this home still serves."""
    if not (where.home / "state.db").exists():
        return False
    from trimtab.controller.proxy import running_processes
    from trimtab.controller.store.store import Store

    with sole_controller(where.home):
        store = Store.open(where.home)
        found = any(row.role == "envoy" for row in running_processes(store))
        store.close()
    return found


def _wait_until_serving(where: Settings, made: ProcessRecord, log_path: Path) -> dict[str, Any]:
    from trimtab.controller.backends.local import log_tail

    deadline = time.monotonic() + START_TIMEOUT_S
    problem, told_s = "", time.monotonic()
    while time.monotonic() < deadline:
        if not is_running(made):
            raise ControllerError(f"the controller ended: {log_tail(log_path, 1)}")
        if (where.home / "controller.json").exists() and is_present(where.home):
            state: dict[str, Any] = ApiClient(where).get("/state")
            if state["target"]["serving"]:
                return state
            problem = state["problem"] or ""
        if time.monotonic() - told_s >= TELL_PERIOD_S:
            told_s = time.monotonic()
            say(f"still starting; {problem or f'the logs are in {where.logs}'}")
        time.sleep(POLL_S)
    raise ControllerError(f"nothing serves after {START_TIMEOUT_S:g} s; {problem or 'see `trimtab logs`'}")


def down() -> None:
    """Ends everything that this home started: the controller, every replica, trial engine and Envoy."""
    num_ended = stop_everything(settings())
    say(f"ended {num_ended} processes" if num_ended else "nothing was running")


def stop_everything(where: Settings) -> int:
    """Ends the controller, then every recorded process, engines first. Returns how many there were."""
    num_ended = 0
    if is_present(where.home):
        controller = find(where.home)
        record = ProcessRecord(controller.pid, controller.start_ticks, controller.nonce)
        terminate(record, STOP_GRACE_S)
        num_ended += 1
    if not (where.home / "state.db").exists():
        return num_ended
    from trimtab.controller.backends.local import process_of
    from trimtab.controller.proxy import running_processes
    from trimtab.controller.store.store import Store
    from trimtab.controller.store.tables import ProcessRow

    with sole_controller(where.home):
        store = Store.open(where.home)
        for row in running_processes(store):
            say(f"ending the {row.label}" if row.role != "envoy" else "ending Envoy")
            terminate(process_of(row), REPLICA_GRACE_S)
            with store.write() as session:
                session.get_one(ProcessRow, row.id).ended_unix_s = store.now()
            num_ended += 1
        store.close()
    return num_ended


def status(as_json: Json = False) -> None:
    """Says what runs, what the loop is doing and why, and gives a fresh link to the console."""
    api = ApiClient(settings())
    state = api.get("/state")
    link = f"{api.presence.url}/?token={api.post('/links')['token']}"
    if as_json:
        print_json({**state, "console": link})
        return
    target, traffic = state["target"], state["traffic"]
    print(f"target      {target['name']}: {target['model']} at {target['url']} (policy {target['policy']})")
    print(f"stable      {target['configuration_id']} {'serving' if target['serving'] else 'not serving yet'}")
    print(f"            {knobs(target['configuration'])}")
    if traffic:
        rate = "unknown" if traffic["requests_per_s"] is None else f"{traffic['requests_per_s']:.2f} requests/s"
        print(f"traffic     {rate}, errors {_ratio(traffic['error_ratio'])}")
    if state["experiment"]:
        experiment = state["experiment"]
        told = experiment["reason"] or (experiment["progress"] or {}).get("told", "starting")
        print(f"experiment  {experiment['id']} {experiment['state']}: {told}")
    if state["rollout"]:
        rollout = state["rollout"]
        print(f"rollout     {rollout['id']} {rollout['phase']}: {rollout['sentence']}")
    if state["problem"]:
        print(f"problem     {state['problem']}")
    print(f"console     {link}  (opens once)")


def _ratio(value: float | None) -> str:
    return "none seen" if value is None else f"{value:.2%}"


def logs(
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many lines of each log.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with the controller's log.")] = False,
) -> None:
    """Prints the end of the controller's, Envoy's and the replicas' logs."""
    where = settings()
    paths = sorted(where.logs.glob("*.log"))
    if not paths:
        raise ControllerError(f"there are no logs in {where.logs}; `trimtab up` starts a controller")
    for path in paths:
        print(f"== {path}")
        with path.open(errors="replace") as log:
            for line in deque(log, maxlen=lines):
                print(line, end="")
    if follow:
        _follow(where.logs / "controller.log")


def _follow(path: Path) -> None:
    sys.stdout.flush()
    path.touch()
    with path.open(errors="replace") as log:
        log.seek(0, 2)
        while True:
            line = log.readline()
            if line:
                print(line, end="", flush=True)
            else:
                time.sleep(POLL_S)
