"""Reads manifests from YAML text so that every problem names its file, line, what was found and what is accepted.

Text in, manifests out: the caller reads the file. Numbers, booleans and strings follow YAML 1.1's safe schema;
anchors are refused, since a manifest that Kubernetes takes has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import ValidationError

from trimtab.engine.contract import ChoiceKnob, FloatKnob, IntKnob, KnobCatalogue
from trimtab.errors import KnobError, ManifestError
from trimtab.policies.manifest import API_VERSION, KINDS, ChoiceSpace, Manifest, RangeSpace, TunedEngine, TuningPolicy

MAX_TEXT_BYTES = 1024 * 1024
MAX_DEPTH = 64
Path = tuple[str | int, ...]

# Keys that the design names and Trimtab does not have yet: refused by name, not as a typing mistake.
NOT_BUILT: frozenset[Path] = frozenset(
    {
        ("spec", "search", "window"),
        ("spec", "triggers", "drift"),
        ("spec", "triggers", "sloBurn"),
        ("spec", "workload", "window"),
        ("spec", "kubernetes"),
    }
)


@dataclass(frozen=True, slots=True)
class _Document:
    data: Any
    lines: Mapping[Path, int]  # 1-based line of each value, by its path

    def line(self, path: Path) -> int:
        """The line of ``path``, or of its nearest ancestor that the text has."""
        while path not in self.lines and path:
            path = path[:-1]
        return self.lines.get(path, 1)


def parse_manifests(text: str, file: str, catalogues: Mapping[str, KnobCatalogue]) -> list[Manifest]:
    """Every manifest in ``text``, in order.

    ``catalogues`` (by engine name) are what ranges are checked against: a policy's space against the engine of the
    target in the same text that names it, or else against every catalogue.

    Raises:
        ManifestError: one line a problem, each ``FILE:LINE: PATH: found …; accepted …``.
    """
    documents = list(_documents(text, file))
    if not documents:
        raise ManifestError(f"{file}:1: no manifest found; accepted: {' and '.join(KINDS)} documents")
    manifests = [_validate(document, file) for document in documents]
    engines = {m.spec.policy: m.spec.engine for m in manifests if isinstance(m, TunedEngine)}
    problems: list[str] = []
    for document, manifest in zip(documents, manifests, strict=True):
        if isinstance(manifest, TunedEngine):
            found = list(_knob_problems(manifest, catalogues[manifest.spec.engine]))
        else:
            named = engines.get(manifest.metadata.name)
            checked = [catalogues[named]] if named else list(catalogues.values())
            found = [p for catalogue in checked for p in _space_problems(manifest, catalogue)]
        problems += [f"{file}:{document.line(path)}: {_dotted(path)}: {message}" for path, message in found]
    if problems:
        raise ManifestError("\n".join(problems))
    return manifests


def _documents(text: str, file: str) -> Iterator[_Document]:
    try:
        if len(text.encode()) > MAX_TEXT_BYTES:
            raise ManifestError(f"{file}:1: the text is over {MAX_TEXT_BYTES} bytes")
        _refuse_aliases(text, file)
        loader = yaml.SafeLoader(text)
        while loader.check_node() and (node := loader.get_node()) is not None:
            lines: dict[Path, int] = {}
            _index_lines(node, (), lines, file)
            data = loader.construct_document(node)
            if data is not None:
                yield _Document(data, lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ManifestError(f"{file}:{mark.line + 1 if mark else 1}: not YAML: {error.problem}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise ManifestError(f"{file}:1: not YAML: {reason}") from error


def _refuse_aliases(text: str, file: str) -> None:
    """Refuses deep nesting too: the scanner's time grows faster than its square, hours for a file of brackets."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            line = event.start_mark.line + 1 if event.start_mark else 1
            raise ManifestError(f"{file}:{line}: anchors and aliases are not accepted")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            line = event.start_mark.line + 1 if event.start_mark else 1
            raise ManifestError(f"{file}:{line}: nested deeper than {MAX_DEPTH} levels")


def _index_lines(node: yaml.Node, path: Path, lines: dict[Path, int], file: str) -> None:
    lines[path] = node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*path, str(key.value))
            if inner in lines:
                raise ManifestError(f"{file}:{key.start_mark.line + 1}: {_dotted(inner)}: the key is given twice")
            _index_lines(value, inner, lines, file)
            lines[inner] = key.start_mark.line + 1
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _index_lines(value, (*path, index), lines, file)


def _validate(document: _Document, file: str) -> Manifest:
    data = document.data
    if not isinstance(data, dict):
        raise ManifestError(f"{file}:{document.line(())}: found {type(data).__name__}; accepted: a mapping with kind")
    kind = str(data.get("kind"))
    if kind not in KINDS:
        line = document.line(("kind",))
        raise ManifestError(f"{file}:{line}: kind: found {kind!r}; accepted: {', '.join(KINDS)}")
    if data.get("apiVersion") != API_VERSION:
        line = document.line(("apiVersion",))
        raise ManifestError(f"{file}:{line}: apiVersion: found {data.get('apiVersion')!r}; accepted: {API_VERSION}")
    try:
        return KINDS[kind].model_validate(data)
    except ValidationError as error:
        raise ManifestError("\n".join(_explain(error, document, file))) from error


def _explain(error: ValidationError, document: _Document, file: str) -> Iterator[str]:
    for problem in error.errors(include_url=False):
        path = tuple(
            p for p in problem["loc"] if p not in ("range", "choices", "synthetic", "trace") or _has(document, p)
        )
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            what = "not built yet" if path in NOT_BUILT else "unknown key"
            message = f"{what}; accepted: {', '.join(_accepted_keys(document, path))}"
        elif problem["type"] == "missing":
            message = "required, and missing"
        elif problem["type"] != "value_error" and not isinstance(problem["input"], dict | list):
            message = f"found {problem['input']!r}: {message[0].lower()}{message[1:]}"
        yield f"{file}:{document.line(path)}: {_dotted(path)}: {message}"


def _has(document: _Document, part: str | int) -> bool:
    return any(part in path for path in document.lines)


def _accepted_keys(document: _Document, path: Path) -> list[str]:
    """The keys beside the unknown one, from the JSON Schema of the document's kind."""
    root = KINDS[document.data["kind"]].model_json_schema()
    schemas = [root]
    for part in path[:-1]:
        schemas = [inner for schema in schemas for inner in _inner_schemas(schema, part, root)]
    keys = {key for schema in schemas for key in _resolved(schema, root).get("properties", {})}
    return sorted(keys)


def _inner_schemas(schema: dict[str, Any], part: str | int, root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    schema = _resolved(schema, root)
    found = schema.get("items") if isinstance(part, int) else schema.get("properties", {}).get(part)
    found = found or schema.get("additionalProperties")
    if isinstance(found, dict):
        yield from found.get("oneOf") or found.get("anyOf") or [found]


def _resolved(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    reference = schema.get("$ref")
    resolved: dict[str, Any] = root["$defs"][reference.rsplit("/", 1)[1]] if reference else schema
    return resolved


def _knob_problems(target: TunedEngine, catalogue: KnobCatalogue) -> Iterator[tuple[Path, str]]:
    for name, value in target.spec.configuration.items():
        path = ("spec", "configuration", name)
        try:
            catalogue[name].check(value)
        except KnobError as error:
            yield path, str(error)
            return
    try:
        catalogue.configuration(target.spec.configuration)
    except KnobError as error:
        yield ("spec", "configuration"), str(error)


def _space_problems(policy: TuningPolicy, catalogue: KnobCatalogue) -> Iterator[tuple[Path, str]]:
    space = policy.spec.search.space
    for name, knob_space in space.items():
        path: Path = ("spec", "search", "space", name)
        try:
            knob = catalogue[name]
            if isinstance(knob_space, ChoiceSpace):
                for value in knob_space.choices:
                    knob.check(value)
            elif isinstance(knob, ChoiceKnob):
                yield path, f"found a range; {knob.accepted()}"
                continue
            else:
                _check_range(knob, knob_space)
            for other, values in (knob_space.when or {}).items():
                if other == name or other not in space:
                    yield (
                        (*path, "when"),
                        f"{other!r} is not another knob of this space; accepted: {', '.join(space)}",
                    )
                    continue
                for value in values:
                    catalogue[other].check(value)
        except KnobError as error:
            yield path, str(error)


def _check_range(knob: IntKnob | FloatKnob, space: RangeSpace) -> None:
    knob.check(space.low)
    knob.check(space.high)


def _dotted(path: Path) -> str:
    return ".".join(str(part) for part in path) or "document"
