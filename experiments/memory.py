"""The cheap memory check: refuses what surely cannot fit, before an engine is started for it.

A lower bound on purpose. What it lets through may still run out of memory, and is then a failed trial; what it
refuses could not have run.
"""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.engine.contract import Configuration

RUNTIME_BYTES = 200 * 1024**2  # an interpreter with torch, idle

_BYTES_PER_PARAMETER = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The model that is tuned. ``digest`` is its file's SHA-256; ``num_parameters`` is ``None`` when unknown."""

    name: str
    digest: str
    file_bytes: int
    num_parameters: int | None = None


def needed_bytes(configuration: Configuration, model: ModelFacts) -> int:
    """The least memory that an engine needs: its weights, its KV pool and the runtime."""
    return round(_weight_bytes(configuration, model)) + int(configuration["kv_cache_bytes"]) + RUNTIME_BYTES


def why_it_cannot_fit(configuration: Configuration, model: ModelFacts, memory_bytes: int) -> str | None:
    """A sentence with numbers, or ``None`` when it may fit into ``memory_bytes``."""
    needed = needed_bytes(configuration, model)
    if needed <= memory_bytes:
        return None
    return f"needs at least {needed / 2**20:.0f} MiB, and a replica has {memory_bytes / 2**20:.0f} MiB"


def _weight_bytes(configuration: Configuration, model: ModelFacts) -> float:
    per_parameter = _BYTES_PER_PARAMETER.get(str(configuration["quantization"]), 0.5)
    if model.num_parameters is None:
        return 0.5 * model.file_bytes  # an int8 file's weights may be kept as int4
    return per_parameter * model.num_parameters
