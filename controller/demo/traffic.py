"""The demo's users: a load client in a process of its own that runs until it is told to stop and counts all."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.errors import ExperimentError
from trimtab.policies.manifest import SyntheticWorkload

STOP_TIMEOUT_S = 60.0
LONGEST_S = 3600.0


@dataclass(slots=True)
class UserTraffic:
    """Sends ``workload`` to ``url`` until ``stop``."""

    url: str
    model: str
    workload: SyntheticWorkload
    report_file: Path
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        law, out = self.workload.promptTokens, self.workload.outputTokens
        options = {
            "--url": self.url,
            "--model": self.model,
            "--json": self.report_file,
            "--rate": self.workload.rate,
            "--duration": LONGEST_S,
            "--arrivals": self.workload.arrivals.process,
            "--cv": self.workload.arrivals.cv,
            "--prompt-median": law.median,
            "--prompt-max": law.max,
            "--output-median": out.median,
            "--output-max": out.max,
            "--sigma": law.sigma,
            "--split": 7,  # neither the search's requests nor the confirmation's
        }
        argv = [sys.executable, "-P", "-m", "trimtab.experiments.load"]
        argv += [str(word) for option in options.items() for word in option]
        with self.report_file.with_suffix(".log").open("wb") as log:
            self._process = subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True)

    def stop(self) -> dict[str, Any]:
        """Lets what is in flight finish and returns the totals: sent, succeeded, refused, failed, lost.

        Raises:
            ExperimentError: the client did not end or wrote no totals.
        """
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_TIMEOUT_S)
            totals: dict[str, Any] = json.loads(self.report_file.read_text())
        except (subprocess.TimeoutExpired, OSError, json.JSONDecodeError) as error:
            self._process.kill()
            raise ExperimentError(f"the demo's traffic gave no totals: {error}") from error
        return totals
