"""The command line without a controller: results on standard output, errors in one line, documented exit codes."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
import structlog
import typer
import typer.main
import yaml
from jsonschema import Draft202012Validator

from trimtab.controller.cli.knob_options import parse_knobs
from trimtab.controller.cli.main import app, main
from trimtab.controller.presence import is_present
from trimtab.errors import KnobError

TRIMTAB = [sys.executable, "-P", "-m", "trimtab.controller.cli"]
PRESETS = files("trimtab.policies") / "presets"
CHAT = (PRESETS / "chat.yaml").read_text()
SHARING = CHAT + "  share: true\n"
TARGET = """
apiVersion: trimtab.dev/v1alpha1
kind: TunedEngine
metadata: {{name: tiny}}
spec: {{policy: chat, model: {model}, port: {port}, resources: {{cpus: 1, memory: 2GiB}}}}
"""
ONE_LINE = re.compile(r"trimtab: [^\n]+\n")


class Trimtab:
    """Runs the command with an empty home; in this process where it starts none, which is quicker."""

    def __init__(self, folder: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capture = capture

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            patch.setattr(sys, "argv", ["trimtab", *words])
            code = 0
            try:
                main()
            except SystemExit as ended:
                code = int(ended.code or 0)
        out, err = self._capture.readouterr()
        return subprocess.CompletedProcess(words, code, out, err)

    def real(self, *words: str) -> subprocess.CompletedProcess[str]:
        """In a process of its own."""
        return subprocess.run([*TRIMTAB, *words], check=False, cwd=self.folder, capture_output=True, text=True)

    def error(self, *words: str) -> str:
        """What a refused command says: one line on standard error, nothing on standard output, exit code 1."""
        ended = self(*words)
        assert (ended.returncode, ended.stdout) == (1, ""), ended
        assert ONE_LINE.fullmatch(ended.stderr), ended.stderr
        return ended.stderr


@pytest.fixture
def trimtab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Trimtab]:
    monkeypatch.setenv("TRIMTAB_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    yield Trimtab(tmp_path, capsys)
    assert not is_present(tmp_path / "home")
    structlog.reset_defaults()


def commands(group: typer.core.TyperGroup, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        yield (*path, name)
        if isinstance(command, typer.core.TyperGroup):
            yield from commands(command, (*path, name))


def every_command() -> list[tuple[str, ...]]:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    return list(commands(group))


def test_every_command_and_option_says_what_it_is_for() -> None:
    group = typer.main.get_command(app)
    for path in every_command():
        command = group
        for name in path:
            assert isinstance(command, typer.core.TyperGroup)
            command = command.commands[name]
        assert command.help, path
        for parameter in command.params:
            assert getattr(parameter, "help", None), (path, parameter.name)


@pytest.mark.parametrize("words", [(), ("tune",), ("rollout", "start"), ("policy",)])
def test_help_names_options_and_commands(trimtab: Trimtab, words: tuple[str, ...]) -> None:
    ended = trimtab(*words, "--help")
    assert ended.returncode == 0
    assert f"Usage: trimtab {' '.join(words)}".strip() in ended.stdout


def test_the_engine_s_own_help_is_passed_through(trimtab: Trimtab) -> None:
    ended = trimtab.real("engine", "serve", "--help")
    assert ended.returncode == 0
    for option in ("--model", "--admin-port", "--knobs", "--inject", "--drain-timeout-s"):
        assert option in ended.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("statsu",),
        ("status", "--jsno"),
        ("up",),
        ("rollout", "start"),
        ("rollout", "status", "first"),
        ("experiment", "show"),
        ("logs", "--lines", "0"),
        ("policy", "validate"),
    ],
)
def test_wrong_usage_exits_with_2(trimtab: Trimtab, words: tuple[str, ...]) -> None:
    ended = trimtab(*words)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "Usage:" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("status",),
        ("status", "--json"),
        ("experiment", "list"),
        ("experiment", "show", "1"),
        ("experiment", "start"),
        ("rollout", "list", "--json"),
        ("rollout", "status"),
        ("rollout", "watch", "1"),
        ("rollout", "start", "--set", "max_num_seqs=4"),
        ("rollout", "abort"),
        ("logs",),
        ("logs", "--follow"),
    ],
)
def test_without_a_controller_one_line_says_how_to_start_one(trimtab: Trimtab, words: tuple[str, ...]) -> None:
    told = trimtab.error(*words)
    assert "`trimtab up`" in told
    assert str(trimtab.folder / "home") in told


def test_ending_nothing_is_no_error(trimtab: Trimtab) -> None:
    ended = trimtab("down")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "nothing was running\n")


def test_a_good_manifest_is_valid(trimtab: Trimtab) -> None:
    (trimtab.folder / "f.yaml").write_text(CHAT + "---" + TARGET.format(model="m.gguf", port=8000))
    ended = trimtab.real("policy", "validate", "f.yaml")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == ["TuningPolicy chat is valid", "TunedEngine tiny is valid"]


def test_every_mistake_is_a_line_with_file_and_line(trimtab: Trimtab) -> None:
    broken = CHAT.replace("tpot: {p95: 60ms}", "tpot: {p95: 60}").replace(
        "budget: {trials: 20", "budget: {trails: 20"
    )
    (trimtab.folder / "f.yaml").write_text(broken)
    ended = trimtab("policy", "validate", "f.yaml")
    assert (ended.returncode, ended.stdout) == (1, "")
    lines = ended.stderr.removeprefix("trimtab: ").splitlines()
    assert len(lines) == 2
    for line, part in zip(lines, ("p95: 60}", "trails"), strict=True):
        number = next(i for i, text in enumerate(broken.splitlines(), 1) if part in text)
        assert line.startswith(f"f.yaml:{number}: spec.")


def test_a_line_number_stays_a_number(trimtab: Trimtab) -> None:
    """Terminal libraries turn a number between colons into an emoji: ":100:" is one."""
    (trimtab.folder / "f.yaml").write_text("#\n" * 99 + "kind: '[bold]Nothing[/bold]'\n")
    assert trimtab.error("policy", "validate", "f.yaml").startswith(
        "trimtab: f.yaml:100: kind: found '[bold]Nothing[/bold]'"
    )


def test_a_missing_file_is_named(trimtab: Trimtab) -> None:
    for words in (("policy", "validate", "no.yaml"), ("up", "-f", "no.yaml"), ("tune", "-f", "no.yaml")):
        assert "no.yaml: cannot be read" in trimtab.error(*words)


@pytest.mark.parametrize("kind", ["TuningPolicy", "TunedEngine"])
def test_the_schema_is_a_json_schema_that_canonical_manifests_meet(trimtab: Trimtab, kind: str) -> None:
    schema = json.loads(trimtab("policy", "schema", kind).stdout)
    Draft202012Validator.check_schema(schema)
    (trimtab.folder / "f.yaml").write_text(CHAT + "---" + TARGET.format(model="m.gguf", port=8000))
    canonical = json.loads(trimtab("policy", "validate", "--json", "f.yaml").stdout)
    manifest = next(m for m in canonical if m["kind"] == kind)
    Draft202012Validator(schema).validate(manifest)
    assert list(Draft202012Validator(schema).iter_errors({**manifest, "spec": {**manifest["spec"], "more": 1}}))


def test_the_schema_takes_what_people_write(trimtab: Trimtab) -> None:
    schema = json.loads(trimtab("policy", "schema").stdout)
    Draft202012Validator(schema).validate(yaml.safe_load(CHAT))


def test_an_unknown_kind_or_preset_is_told_the_accepted_ones(trimtab: Trimtab) -> None:
    assert "TuningPolicy, TunedEngine" in trimtab.error("policy", "schema", "Policy")
    assert "accepted: chat" in trimtab.error("policy", "init", "chatt")
    assert "smollm2-135m-instruct" in trimtab.error("model", "fetch", "gpt")


def test_a_preset_is_written_once(trimtab: Trimtab) -> None:
    assert trimtab("policy", "init").returncode == 0
    path = trimtab.folder / "policy.yaml"
    assert path.read_text() == CHAT
    path.write_text("mine")
    assert "policy.yaml exists" in trimtab.error("policy", "init")
    assert path.read_text() == "mine"
    assert trimtab("policy", "init", "chat", "-o", "other.yaml").returncode == 0
    assert "cannot be written" in trimtab.error("policy", "init", "-o", "no-folder/policy.yaml")


def test_models_and_findings_are_pure_json(trimtab: Trimtab) -> None:
    (model,) = json.loads(trimtab("model", "list", "--json").stdout)
    assert model == {"name": "smollm2-135m-instruct", "license": "Apache-2.0", "cached": False}
    ended = trimtab("doctor", "--json")
    findings = {f["what"]: f for f in json.loads(ended.stdout)}
    assert findings["model"]["ok"] is False
    assert "trimtab model fetch" in findings["model"]["mend"]
    assert findings["Envoy"]["ok"] is True
    assert ended.returncode == 1
    assert "MISSING model: not cached; run `trimtab model fetch`" in trimtab("doctor").stdout


def test_a_plan_says_what_a_search_costs_and_leaves_no_trace(trimtab: Trimtab, tiny_model_dir: Path) -> None:
    (trimtab.folder / "f.yaml").write_text(SHARING + "---" + TARGET.format(model=tiny_model_dir, port=8000))
    ended = trimtab("tune", "--plan", "--json", "-f", "f.yaml")
    assert ended.returncode == 0, ended.stderr
    plan = json.loads(ended.stdout)
    assert plan["num_trials"] == 20
    assert plan["search_minutes"] <= 30
    assert "max_num_seqs" in plan["searched_knobs"]
    told = trimtab("tune", "--plan", "-f", "f.yaml").stdout
    assert told.startswith("20 trials and ")
    assert not (trimtab.folder / "home").exists()


def test_a_model_that_is_not_there_is_one_line(trimtab: Trimtab) -> None:
    (trimtab.folder / "f.yaml").write_text(SHARING + "---" + TARGET.format(model="/no/model.gguf", port=8000))
    for words in (("up",), ("tune",), ("tune", "--plan")):
        ended = trimtab(*words, "-f", "f.yaml")
        assert (ended.returncode, ended.stdout) == (1, "")
        assert "/no/model.gguf" in ended.stderr.splitlines()[-1]
        assert "Traceback" not in ended.stderr


def test_a_port_of_another_program_is_refused_at_once(trimtab: Trimtab, tiny_model_dir: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        (trimtab.folder / "f.yaml").write_text(SHARING + "---" + TARGET.format(model=tiny_model_dir, port=port))
        told = trimtab.error("up", "-f", "f.yaml")
    assert f"port {port} cannot be used (Address already in use)" in told
    assert "spec.port" in told


def test_ctrl_c_is_one_line_and_130(trimtab: Trimtab) -> None:
    logs = trimtab.folder / "home/logs"
    logs.mkdir(parents=True)
    (logs / "controller.log").write_text("it is up\n")
    with subprocess.Popen(
        [*TRIMTAB, "logs", "--follow"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as following:
        assert following.stdout is not None
        assert following.stdout.readline().startswith("== ")
        assert following.stdout.readline() == "it is up\n"
        following.send_signal(signal.SIGINT)
        out, told = following.communicate(timeout=20)
    assert following.returncode == 130
    assert "interrupted" in told
    assert "Traceback" not in told + out


@pytest.mark.parametrize(
    ("text", "value"),
    [("8", 8), ("0.5", 0.5), ("1e-1", 0.1), ("off", "off"), ("nan", "nan"), ("inf", "inf"), ("-3", -3)],
)
def test_knob_values_are_typed(text: str, value: object) -> None:
    (found,) = parse_knobs([f"k={text}"]).values()
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("pair", ["k", "=1", "k=", ""])
def test_a_pair_without_name_or_value_is_refused(pair: str) -> None:
    with pytest.raises(KnobError, match="KNOB=VALUE"):
        parse_knobs([pair])
