"""Quantities as people write them in manifests (``60ms``, ``10%``, ``4GiB``, ``2/s``), and back.

Each type is a plain ``float`` or ``int`` in base units once parsed. A bare number is refused: the unit is part of
the value.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
_NUMBER = r"\d+(?:\.\d+)?"


def parse_duration(value: Any) -> float:
    """``"60ms"`` → 0.06 seconds. Raises ``ValueError`` naming the accepted units."""
    return _parse(value, "a duration", _SECONDS, "60ms, 1s, 30m or 24h")


def parse_share(value: Any) -> float:
    """``"10%"`` → 0.1. Raises ``ValueError`` when the percent sign is missing."""
    return _parse(value, "a share", {"%": 0.01}, "10%")


def parse_bytes(value: Any) -> int:
    """``"4GiB"`` → 4294967296 bytes. Raises ``ValueError`` naming the accepted units."""
    return int(_parse(value, "a size", _BYTES, "512MiB or 4GiB"))


def parse_rate(value: Any) -> float:
    """``"2/s"`` or ``"90/m"`` → requests per second. Raises ``ValueError`` naming the accepted units."""
    return _parse(value, "a rate", {"/s": 1.0, "/m": 1 / 60, "/h": 1 / 3600}, "2/s or 90/m")


def _parse(value: Any, what: str, units: dict[str, float] | dict[str, int], example: str) -> float:
    accepted = f"accepted: a number with its unit ({', '.join(units)}), such as {example}"
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not {what}: it has no unit; {accepted}")
    match = re.fullmatch(rf"({_NUMBER})\s*(\D+)", value.strip())
    if match is None or match[2] not in units:
        raise ValueError(f"{value!r} is not {what}; {accepted}")
    return round(float(match[1]) * units[match[2]], 12)


def format_duration(seconds: float) -> str:
    """The shortest exact spelling: 0.06 → ``60ms``, 1800 → ``30m``."""
    for unit in ("d", "h", "m", "s"):
        if seconds >= _SECONDS[unit] and round(seconds / _SECONDS[unit], 9) % 1 == 0:
            return f"{seconds / _SECONDS[unit]:g}{unit}"
    return f"{seconds * 1000:.12g}ms" if seconds < 1 else f"{seconds:.12g}s"


def format_bytes(size: int) -> str:
    """The largest unit that divides ``size``: 536870912 → ``512MiB``."""
    for unit in ("GiB", "MiB", "KiB"):
        if size and size % _BYTES[unit] == 0:
            return f"{size // _BYTES[unit]}{unit}"
    return f"{size}B"


def _quantity(pattern: str, example: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": pattern, "examples": [example]})


Seconds = Annotated[
    float,
    BeforeValidator(parse_duration),
    PlainSerializer(format_duration),
    _quantity(rf"^{_NUMBER}\s*(ms|s|m|h|d)$", "60ms"),
]
Share = Annotated[
    float,
    BeforeValidator(parse_share),
    PlainSerializer(lambda ratio: f"{ratio * 100:.12g}%"),
    _quantity(rf"^{_NUMBER}\s*%$", "10%"),
]
Bytes = Annotated[
    int,
    BeforeValidator(parse_bytes),
    PlainSerializer(format_bytes),
    _quantity(rf"^{_NUMBER}\s*(B|KiB|MiB|GiB)$", "4GiB"),
]
Rate = Annotated[
    float,
    BeforeValidator(parse_rate),
    PlainSerializer(lambda per_s: f"{per_s:.12g}/s"),
    _quantity(rf"^{_NUMBER}\s*/(s|m|h)$", "2/s"),
]
