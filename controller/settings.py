"""The controller's and the command line's settings: the environment is read here, once a process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Settings:
    """Where things live. Every folder is made when it is first written to, for its owner only."""

    home: Path  # state, logs, experiments; TRIMTAB_HOME
    cache: Path  # models and reference values, kept across homes; TRIMTAB_CACHE
    prometheus_url: str | None  # None: scrape the engines directly; TRIMTAB_PROMETHEUS_URL

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        user = Path(environment.get("HOME", "/"))
        return cls(
            home=Path(environment.get("TRIMTAB_HOME") or user / ".trimtab").absolute(),
            cache=Path(environment.get("TRIMTAB_CACHE") or user / ".cache/trimtab").absolute(),
            prometheus_url=environment.get("TRIMTAB_PROMETHEUS_URL") or None,
        )

    @property
    def logs(self) -> Path:
        return self.home / "logs"


def settings() -> Settings:
    """The settings of this process."""
    return Settings.from_environment(os.environ)
