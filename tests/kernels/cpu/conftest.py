"""Every level of the native kernels that this CPU runs, built once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimtab.kernels.cpu.build import Level, supported_levels
from trimtab.kernels.cpu.library import Library


@pytest.fixture(scope="session", params=supported_levels(), ids=lambda level: level.name)
def library(request: pytest.FixtureRequest, kernel_cache: Path) -> Library:
    level: Level = request.param
    return Library(level, kernel_cache)
