"""The engine process's settings: its command line, and the environment, read once.

``__main__`` is the only caller.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from trimtab.engine.adapters.embedded import ADMIN_TOKEN_VARIABLE, CATALOGUE
from trimtab.engine.contract import Configuration
from trimtab.engine.embedded import inject
from trimtab.errors import KnobError, TrimtabError

API_KEY_VARIABLE = "TRIMTAB_ENGINE_API_KEY"
CACHE_VARIABLE = "TRIMTAB_CACHE"
KERNEL_CHOICES = ("auto", "torch", "avx512", "avx2", "plain")
DEFAULT_MAX_QUEUE = 256
DEFAULT_DRAIN_TIMEOUT_S = 120.0


class UsageError(TrimtabError):
    """The command line or the environment is wrong; the message is one line."""


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """What ``serve`` was asked to do.

    ``drain_timeout_s`` bounds how long SIGTERM waits for requests in flight. ``api_key`` is what traffic must show as
    its bearer token; ``None``, on loopback only: nothing.
    """

    model_path: Path
    model_name: str
    host: str
    port: int
    admin_host: str
    admin_port: int
    admin_token: str
    api_key: str | None
    configuration: Configuration
    injection: inject.Injection | None
    swap_file: Path | None  # where KV blocks are swapped to; None: to memory
    kernels: str  # one of KERNEL_CHOICES
    kernel_folder: Path  # where compiled kernels are kept
    max_queue: int
    drain_timeout_s: float


def read_settings(argv: Sequence[str], environ: Mapping[str, str]) -> ServeSettings:
    """Raises ``UsageError``; ``--help`` prints and exits as argparse does."""
    arguments = _parser().parse_args(argv)
    token = environ.get(ADMIN_TOKEN_VARIABLE, "")
    if not token:
        raise UsageError(f"the admin port needs a token: set {ADMIN_TOKEN_VARIABLE}")
    if not token.isascii() or any(c.isspace() for c in token):
        raise UsageError(f"{ADMIN_TOKEN_VARIABLE} must be ASCII without white space")
    if arguments.port == arguments.admin_port and arguments.host == arguments.admin_host:
        raise UsageError(f"--port and --admin-port are both {arguments.port}; give two ports")
    api_key = environ.get(API_KEY_VARIABLE) or None
    if api_key is None and not _is_loopback(arguments.host):
        raise UsageError(
            f"--host {arguments.host} is reachable from outside: set {API_KEY_VARIABLE}, or use 127.0.0.1"
        )
    return ServeSettings(
        model_path=arguments.model,
        model_name=arguments.model_name or arguments.model.stem,
        host=arguments.host,
        port=arguments.port,
        admin_host=arguments.admin_host,
        admin_port=arguments.admin_port,
        admin_token=token,
        api_key=api_key,
        configuration=arguments.knobs,
        injection=arguments.inject,
        swap_file=arguments.kv_swap_file,
        kernels=arguments.kernels,
        kernel_folder=kernel_folder(environ),
        max_queue=arguments.max_queue,
        drain_timeout_s=arguments.drain_timeout_s,
    )


def kernel_folder(environ: Mapping[str, str]) -> Path:
    """Where compiled kernels are kept: beside the cached models."""
    cache = environ.get(CACHE_VARIABLE)
    return (Path(cache) if cache else Path(environ.get("HOME", "/")) / ".cache/trimtab").absolute() / "kernels"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing usage over several lines."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="trimtab.engine.embedded", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    serve = commands.add_parser("serve", help="serve one model over HTTP", allow_abbrev=False)
    add = serve.add_argument
    add("--model", type=Path, required=True, help="a .gguf file or a Hugging Face folder")
    add("--model-name", help="the name that requests use (default: the file's)")
    add("--host", default="127.0.0.1", help="address of the traffic port")
    add("--port", type=_port, required=True, help="traffic port")
    add("--admin-host", default="127.0.0.1", help="address of the admin port")
    add("--admin-port", type=_port, required=True, help="admin port")
    add("--knobs", type=_configuration, default=CATALOGUE.default(), help="a JSON object of knobs")
    add("--kv-swap-file", type=Path, help="a new file to swap KV blocks to, gone with the engine (default: memory)")
    add("--inject", type=_injection, help=f"labelled fault injection: {inject.ACCEPTED}")
    add(
        "--kernels",
        choices=KERNEL_CHOICES,
        default="auto",
        help="native kernels of a level, or torch (default: auto)",
    )
    add("--max-queue", type=_positive_int, default=DEFAULT_MAX_QUEUE, help="requests that may wait; more get 429")
    add("--drain-timeout-s", type=_positive_float, default=DEFAULT_DRAIN_TIMEOUT_S, help="how long SIGTERM waits")
    return parser


def _port(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; accepted: 1 to 65535")
    return int(text)


def _positive_int(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: whole numbers from 1")
    return int(text)


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: seconds above 0")
    return value


def _configuration(text: str) -> Configuration:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(values, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    try:
        return CATALOGUE.configuration(values)
    except KnobError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _injection(text: str) -> inject.Injection:
    try:
        return inject.Injection.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
