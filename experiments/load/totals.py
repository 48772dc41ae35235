"""Running totals of a long load, in a file that others may read at any time (it is replaced, never half written)."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trimtab.experiments.load.figures import percentiles
from trimtab.experiments.load.result import Outcome, RequestResult


@dataclass(slots=True)
class _Second:
    """What ended within one second."""

    counts: Counter[Outcome] = field(default_factory=Counter)
    ttfts_s: list[float] = field(default_factory=list)
    tpots_s: list[float] = field(default_factory=list)

    def row(self, second: int) -> dict[str, Any]:
        return {
            "second": second,
            **{outcome.value: self.counts[outcome] for outcome in Outcome},
            "ttft_s": _mean(self.ttfts_s),
            "tpot_s": _mean(self.tpots_s),
        }


class Totals:
    """Counts results as they come. ``now`` is Unix seconds.

    The file: ``sent``, ``succeeded``, ``refused``, ``failed``, ``lost`` (sent and in none of the others, nor in
    flight), ``in_flight``, ``finished``, ``kinds`` (failures by kind), ``ttft_s``, ``tpot_s``, ``itl_s``, ``e2e_s``
    (percentiles over all successes, ``null`` without one), ``output_tokens``, ``lag_s`` and ``timeline``: one row
    for each second since ``started_unix_s`` in which a request ended, with its outcomes and mean latencies.
    """

    def __init__(self, path: Path, *, now: Callable[[], float] = time.time) -> None:
        self._path = path
        self._now = now
        self._started_unix_s = now()
        self._results: list[RequestResult] = []
        self._seconds: dict[int, _Second] = {}

    def add(self, result: RequestResult) -> None:
        """Counts one ended request."""
        self._results.append(result)
        second = self._seconds.setdefault(int(self._now() - self._started_unix_s), _Second())
        second.counts[result.outcome] += 1
        if result.outcome is Outcome.SUCCEEDED:
            second.ttfts_s += [result.ttft_s] if result.ttft_s is not None else []
            second.tpots_s += [result.tpot_s] if result.tpot_s is not None else []

    def counts(self, num_sent: int, num_in_flight: int) -> dict[str, int]:
        """``{sent, succeeded, refused, failed, lost}``."""
        seen = Counter(r.outcome for r in self._results)
        ended = {outcome.value: seen[outcome] for outcome in Outcome}
        return {"sent": num_sent, **ended, "lost": num_sent - num_in_flight - len(self._results)}

    def write(self, num_sent: int, num_in_flight: int, *, finished: bool, lag_s: float | None = None) -> None:
        """Replaces the file."""
        succeeded = [r for r in self._results if r.outcome is Outcome.SUCCEEDED]
        figures = {
            "ttft_s": percentiles(r.ttft_s for r in succeeded),
            "tpot_s": percentiles(r.tpot_s for r in succeeded),
            "itl_s": percentiles(itl for r in succeeded for itl in r.itls_s),
            "e2e_s": percentiles(r.e2e_s for r in succeeded),
        }
        body = {
            **self.counts(num_sent, num_in_flight),
            "in_flight": num_in_flight,
            "finished": finished,
            "started_unix_s": self._started_unix_s,
            "updated_unix_s": self._now(),
            "kinds": Counter(r.kind for r in self._results if r.kind is not None),
            **{name: asdict(seen) if seen else None for name, seen in figures.items()},
            "output_tokens": sum(r.output_tokens for r in succeeded),
            "lag_s": lag_s,
            "timeline": [second.row(number) for number, second in sorted(self._seconds.items())],
        }
        part = self._path.with_name(f"{self._path.name}.part")
        part.write_text(json.dumps(body), encoding="utf-8")
        os.replace(part, self._path)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
