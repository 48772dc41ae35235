"""``trimtab policy``: validate a manifest, print the schema, write a preset."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from trimtab.controller.cli.output import print_json, say
from trimtab.controller.targets import read_manifests
from trimtab.engine.registry import catalogues
from trimtab.errors import ManifestError
from trimtab.policies.manifest import KINDS

app = typer.Typer(no_args_is_help=True, help="Validate policies, print their schema, start from a preset.")


@app.command()
def validate(
    files: Annotated[list[Path], typer.Argument(help="Manifest files.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifests in canonical form.")] = False,
) -> None:
    """Checks manifests; every mistake names its file, line, what was found and what is accepted."""
    manifests = read_manifests(files, catalogues())
    if as_json:
        print_json([m.model_dump(mode="json", by_alias=True, exclude_none=True) for m in manifests])
        return
    for manifest in manifests:
        print(f"{manifest.kind} {manifest.metadata.name} is valid")


@app.command()
def schema(kind: Annotated[str, typer.Argument(help="TuningPolicy or TunedEngine.")] = "TuningPolicy") -> None:
    """Prints a manifest's JSON Schema."""
    if kind not in KINDS:
        raise ManifestError(f"{kind!r} is not a kind; accepted: {', '.join(KINDS)}")
    print_json(KINDS[kind].model_json_schema(mode="serialization"))


@app.command()
def init(
    preset: Annotated[str, typer.Argument(help="The preset's name.")] = "chat",
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("policy.yaml"),
) -> None:
    """Writes a preset to a file to start from; an existing file is never overwritten."""
    folder = resources.files("trimtab.policies") / "presets"
    names = sorted(p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml"))
    if preset not in names:
        raise ManifestError(f"{preset!r} is not a preset; accepted: {', '.join(names)}")
    try:
        with output.open("x") as file:
            file.write((folder / f"{preset}.yaml").read_text())
    except FileExistsError as error:
        raise ManifestError(f"{output} exists; choose another name with --output") from error
    except OSError as error:
        raise ManifestError(f"{output} cannot be written: {error.strerror}") from error
    say(f"wrote {output}; check it with `trimtab policy validate {output}`")
