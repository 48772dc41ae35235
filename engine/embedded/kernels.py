"""Which native kernels an engine process runs on. ``serve`` asks once, before it loads the model."""

from __future__ import annotations

from pathlib import Path

import structlog

from trimtab.engine.embedded.native_model import NativeKernels
from trimtab.errors import KernelBuildError
from trimtab.kernels.cpu.build import supported_levels
from trimtab.kernels.cpu.library import Library

_log = structlog.get_logger(__name__)


def choose_kernels(choice: str, folder: Path, num_threads: int) -> NativeKernels | None:
    """The native kernels of a level; ``None``: torch's operations. Compiles them where ``folder`` has none yet.

    ``auto`` takes the CPU's best level, and torch, with one line in the log, where it cannot be compiled.

    Raises:
        KernelBuildError: the level that was named cannot be compiled, or this CPU lacks its instructions.
    """
    if choice == "torch":
        return None
    supported = supported_levels()
    if choice == "auto":
        try:
            return NativeKernels(Library(supported[0], folder), num_threads)
        except KernelBuildError as error:
            _log.warning(
                "native_kernels_unavailable", reason=str(error), instead="torch's operations, which are slower"
            )
            return None
    level = next((level for level in supported if level.name == choice), None)
    if level is None:
        found = ", ".join(level.name for level in supported)
        raise KernelBuildError(f"this CPU does not run {choice} kernels; it runs {found}")
    return NativeKernels(Library(level, folder), num_threads)
