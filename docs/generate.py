"""Writes what the documentation takes from elsewhere: ``python docs/generate.py``. Tests keep it current.

``docs/reference/*.md`` comes from the code; the figures in README.md and docs/benchmarks.md from benchmarks/results.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from trimtab.controller import settings as controller_settings
from trimtab.controller.cli import main as cli
from trimtab.engine import process
from trimtab.engine.adapters.embedded import ADMIN_TOKEN_VARIABLE
from trimtab.engine.contract import ChoiceKnob, KnobCatalogue
from trimtab.engine.embedded.metrics import EngineMetrics
from trimtab.engine.embedded.serve import ExitCode
from trimtab.engine.embedded.settings import API_KEY_VARIABLE
from trimtab.engine.registry import catalogues
from trimtab.policies.manifest import KINDS

ROOT = Path(__file__).parents[1]
NOTE = "Generated from the code by `docs/generate.py`; do not edit.\n"

# Every environment variable that a process reads, who reads it, and what it means.
VARIABLES = (
    ("TRIMTAB_HOME", "controller, command line", "`~/.trimtab`", "State, logs and experiments of one target."),
    (
        "TRIMTAB_CACHE",
        "controller, command line",
        "`~/.cache/trimtab`",
        "Models and reference values, kept across homes.",
    ),
    ("TRIMTAB_PROMETHEUS_URL", "controller", "none", "A Prometheus to read figures from; none: engines are scraped."),
    (
        ADMIN_TOKEN_VARIABLE,
        "engine",
        "required",
        "The bearer token of the engine's admin port; the controller makes one.",
    ),
    (API_KEY_VARIABLE, "engine", "none", "The bearer token that traffic must show; required beyond loopback."),
    (
        process.NONCE_VARIABLE,
        "every started process",
        "set by Trimtab",
        "Names a process beyond doubt; do not set it.",
    ),
)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; a bar inside a cell is escaped."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join("| " + " | ".join(str(c).replace("|", "\\|") for c in line) + " |\n" for line in lines)


def page(title: str, *parts: str) -> str:
    return "\n".join((f"# {title}\n", NOTE, *parts))


def _default(value: object) -> str:
    return "none" if value is None else f"`{value}`"


def knobs_page(known: Mapping[str, KnobCatalogue]) -> str:
    parts = []
    for engine, catalogue in known.items():
        rows = []
        for knob in catalogue.knobs:
            unit = "" if isinstance(knob, ChoiceKnob) else knob.unit
            accepted = knob.accepted().removeprefix("accepted: ")
            rows.append((f"`{knob.name}`", accepted, f"`{knob.default}`", unit, knob.change_cost, knob.doc))
        columns = ("knob", "accepted", "default", "unit", "change cost", "meaning")
        pairs = "".join(f"\n`{low}` must not exceed `{high}`.\n" for low, high in catalogue.ordered)
        parts.append(f"## Engine `{engine}`\n\n{table(columns, rows)}{pairs}")
    return page("Knobs", *parts)


def metrics_page() -> str:
    rows = [
        (f"`{family.name}{'_total' if family.type == 'counter' else ''}`", family.type, family.documentation)
        for family in EngineMetrics().registry.collect()
        if not family.name.startswith("process_")
    ]
    text = "The embedded engine exports these on `/metrics`, and `process_*` beside them. Times are in seconds.\n"
    return page("Metrics", text, table(("name", "type", "meaning"), sorted(rows)))


def policy_page() -> str:
    parts = []
    for kind, model in KINDS.items():
        root = model.model_json_schema(mode="serialization")
        rows = list(dict.fromkeys(_fields(root, root, "")))
        columns = ("field", "accepted", "default", "meaning")
        parts.append(f"## {kind}\n\n{root.get('description', '')}\n\n{table(columns, rows)}")
    return page("Manifests", *parts)


Field = tuple[str, str, str, str]


def _fields(schema: Mapping[str, Any], root: Mapping[str, Any], path: str) -> Iterator[Field]:
    """Every leaf below ``schema`` as (path, accepted, default, meaning)."""
    required = schema.get("required", [])
    for name, inner in schema.get("properties", {}).items():
        yield from _field(inner, root, f"{path}{name}", name in required)


def _field(schema: Mapping[str, Any], root: Mapping[str, Any], path: str, required: bool) -> Iterator[Field]:
    options = [o for o in _options(schema, root) if o.get("type") != "null"]
    groups = [(o, ".") for o in options if "properties" in o]
    for option in options:
        for inner, step in ((option.get("items"), "[]."), (option.get("additionalProperties"), ".NAME.")):
            if isinstance(inner, Mapping):
                groups += [(o, step) for o in _options(inner, root) if "properties" in o]
    if not groups:
        accepted = " or ".join(dict.fromkeys(_accepted(o) for o in options))
        default = "required" if required else _default(schema.get("default"))
        yield f"`{path}`", accepted, default, schema.get("description", "")
    for group, step in groups:
        yield from _fields(group, root, f"{path}{step}")


def _options(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The alternatives of a schema, its references resolved."""
    if "$ref" in schema:
        return _options(root["$defs"][schema["$ref"].rsplit("/", 1)[1]], root)
    found = schema.get("oneOf") or schema.get("anyOf")
    return [o for inner in found for o in _options(inner, root)] if found else [schema]


def _accepted(schema: Mapping[str, Any]) -> str:
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if "examples" in schema:
        return f"such as {', '.join(f'`{e}`' for e in schema['examples'])}"
    if "pattern" in schema:
        return f"`{schema['pattern']}`"
    bounds = {"minimum": "at least", "maximum": "at most", "exclusiveMinimum": "above", "exclusiveMaximum": "below"}
    told = ", ".join(f"{words} {schema[key]:g}" for key, words in bounds.items() if key in schema)
    return f"{schema.get('type', 'any')} {told}".strip()


def cli_page() -> str:
    group = typer.main.get_command(cli.app)
    codes = (cli.__doc__ or "").split("Exit codes:")[1].strip().rstrip(".")
    rows = [code.split(maxsplit=1) for code in " ".join(codes.split()).split("; ")]
    engine_rows = [(code.value, code.name.lower().replace("_", " ")) for code in ExitCode]
    return page(
        "Command line",
        "Results go to standard output, all else to standard error.\n",
        f"## Exit codes of `trimtab`\n\n{table(('code', 'meaning'), rows)}",
        f"## Exit codes of the engine\n\n{table(('code', 'meaning'), engine_rows)}",
        *_commands(group, "trimtab"),
    )


def _commands(command: Any, path: str) -> Iterator[str]:
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from _commands(inner, f"{path} {name}")
        return
    rows = []
    for parameter in command.params:
        is_argument = parameter.param_type_name == "argument"
        spelled = parameter.name.upper() if is_argument else ", ".join(parameter.opts)
        default = "required" if parameter.required else _default(parameter.default)
        rows.append((f"`{spelled}`", default, parameter.help))
    options = f"\n{table(('argument', 'default', 'meaning'), rows)}" if rows else ""
    yield f"## `{path}`\n\n{command.help}\n{options}"


def settings_page() -> str:
    text = (controller_settings.__doc__ or "").splitlines()[0]
    rows = [(f"`{name}`", *rest) for name, *rest in VARIABLES]
    return page("Settings", f"{text}\n", table(("variable", "read by", "default", "meaning"), rows))


def pages() -> dict[str, str]:
    """Every page's text by its file name."""
    return {
        "cli.md": cli_page(),
        "knobs.md": knobs_page(catalogues()),
        "metrics.md": metrics_page(),
        "policy.md": policy_page(),
        "settings.md": settings_page(),
    }


def benchmark_table(result: Mapping[str, Any]) -> str:
    """Every row of one benchmark's JSON."""
    return table(("case", "median", "range over rounds", "unit", "ratio", "goal"), map(_figures, result["rows"]))


def _figure(value: float) -> str:
    """Three digits, but never fewer than those before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _figures(row: Mapping[str, Any]) -> tuple[str, ...]:
    spread = "" if row["low"] is None else f"{_figure(row['low'])} to {_figure(row['high'])}"
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f} × {row['against']}"
    goal = "" if row["goal"] is None else f"{row['goal']}: {'met' if row['met'] else '**missed**'}"
    return row["case"], _figure(row["value"]), spread, row["unit"], ratio, goal


def readme_table(results: Iterable[Mapping[str, Any]]) -> str:
    """The rows with a goal, and int4's ratios: what a visitor asks first."""
    rows = [
        row for result in results for row in result["rows"] if row["goal"] or row["case"].startswith("int4, decode,")
    ]
    return table(("case", "median", "unit", "ratio", "goal"), ((f[0], f[1], *f[3:]) for f in map(_figures, rows)))


def with_blocks(text: str, blocks: Mapping[str, str]) -> str:
    """``text`` with each block between its ``<!-- NAME -->`` and the next ``<!-- end -->``."""
    for name, block in blocks.items():
        before, _, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        assert end, f"no block {name}"
        text = f"{before}<!-- {name} -->\n\n{block}\n{end}{after}"
    return text


def figures() -> dict[Path, str]:
    """The texts that show benchmarks' figures, with the present ones."""
    results = [json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks/results").glob("*.json"))]
    readme, page = ROOT / "README.md", ROOT / "docs/benchmarks.md"
    return {
        readme: with_blocks(readme.read_text(), {"figures": readme_table(results)}),
        page: with_blocks(page.read_text(), {result["name"]: benchmark_table(result) for result in results}),
    }


def main() -> None:
    for name, text in pages().items():
        (ROOT / "docs/reference" / name).write_text(text)
    for path, text in figures().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
