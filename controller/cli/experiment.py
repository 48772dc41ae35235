"""``trimtab experiment``: list past and present searches, show one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimtab.controller.cli.client import ApiClient
from trimtab.controller.cli.output import on_interrupt, print_json, table
from trimtab.controller.cli.tune import follow_experiment
from trimtab.controller.settings import settings

app = typer.Typer(no_args_is_help=True, help="Start searches, list them, show their reports.")
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@app.command("list")
def list_experiments(as_json: Json = False) -> None:
    """Lists every experiment of this home, oldest first."""
    experiments = ApiClient(settings()).get("/experiments")
    if as_json:
        print_json(experiments)
        return
    table(
        ["ID", "STATE", "TRIGGER", "CONCLUSION"],
        [[e["id"], e["state"], e["trigger"], e["reason"] or (e["progress"] or {}).get("told")] for e in experiments],
    )


@app.command()
def start(as_json: Json = False) -> None:
    """Starts a search in the running controller and follows it; the policy decides what a winner does next."""
    api = ApiClient(settings())
    experiment_id = api.post("/experiments")["id"]
    with on_interrupt(f"experiment {experiment_id} goes on in the controller; see `trimtab status`"):
        experiment = follow_experiment(api, experiment_id)
    if as_json:
        print_json(experiment)
    else:
        print(f"experiment {experiment['id']}: {experiment['reason']}")


@app.command()
def show(
    experiment_id: Annotated[int, typer.Argument(help="The experiment's number.")], as_json: Json = False
) -> None:
    """Prints an experiment's report."""
    experiment = ApiClient(settings()).get(f"/experiments/{experiment_id}")
    if as_json:
        print_json(experiment)
    elif experiment["report_path"]:
        print(Path(experiment["report_path"]).read_text())
    else:
        told = experiment["reason"] or (experiment["progress"] or {}).get("told", "starting")
        print(f"experiment {experiment_id} is {experiment['state']}: {told}")
