"""The command line and the environment: one clear line for each mistake."""

from pathlib import Path

import pytest

from trimtab.engine.adapters.embedded import ADMIN_TOKEN_VARIABLE, EmbeddedAdapter
from trimtab.engine.adapters.interface import Launch
from trimtab.engine.embedded.inject import Injection
from trimtab.engine.embedded.settings import UsageError, read_settings

ENVIRON = {ADMIN_TOKEN_VARIABLE: "secret"}
ARGV = ["serve", "--model", "m.gguf", "--port", "8000", "--admin-port", "8001"]


def test_the_adapters_command_line_is_understood() -> None:
    adapter = EmbeddedAdapter()
    configuration = adapter.catalogue.configuration({"max_num_seqs": 5, "quantization": "int4"})
    command = adapter.command(Launch(Path("m.gguf"), "smol", configuration, 8000, 8001, "secret", "slow_decode=3"))
    settings = read_settings(command.argv[3:], command.env)
    assert (settings.model_name, settings.port, settings.admin_port) == ("smol", 8000, 8001)
    assert settings.configuration == configuration
    assert settings.injection == Injection("slow_decode=3", 3.0)
    assert (settings.host, settings.admin_host, settings.admin_token) == ("127.0.0.1", "127.0.0.1", "secret")


def test_defaults() -> None:
    settings = read_settings(ARGV, ENVIRON)
    assert (settings.model_name, settings.injection, settings.max_queue) == ("m", None, 256)


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        ([], ENVIRON, "required"),
        (["serve"], ENVIRON, "--model"),
        ([*ARGV, "--knobs", "{"], ENVIRON, "not JSON"),
        ([*ARGV, "--knobs", "[]"], ENVIRON, "not a JSON object"),
        ([*ARGV, "--knobs", '{"max_num_seqs": 0}'], ENVIRON, "from 1 to 256"),
        ([*ARGV, "--inject", "slow_decode=0.5"], ENVIRON, "1 to 100"),
        ([*ARGV, "--inject", "slow_decode=nan"], ENVIRON, "1 to 100"),
        ([*ARGV, "--max-queue", "0"], ENVIRON, "from 1"),
        ([*ARGV, "--nonsense"], ENVIRON, "--nonsense"),
        ([*ARGV[:-1], "8000"], ENVIRON, "both 8000"),
        (ARGV, {}, ADMIN_TOKEN_VARIABLE),
        (ARGV, {ADMIN_TOKEN_VARIABLE: "white space"}, "white space"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], environ: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as mistake:
        read_settings(argv, environ)
    assert message in str(mistake.value)
    assert "\n" not in str(mistake.value)
