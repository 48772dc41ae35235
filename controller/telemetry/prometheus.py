"""The metrics source that asks a Prometheus server (through prometheus-api-client) for the raw samples of a window.

Raw samples rather than ``rate()``: both sources then do the same arithmetic on the same counters, and nothing is
extrapolated. The controller writes the replicas into a file for Prometheus' ``file_sd_configs``.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import requests
from prometheus_api_client import PrometheusConnect
from prometheus_api_client.exceptions import PrometheusApiClientException

from trimtab.controller.telemetry.window import TrafficWindow, traffic_window
from trimtab.engine.contract import MetricNames
from trimtab.engine.scrape import Figures, assemble
from trimtab.errors import MetricsError

_Samples = dict[str, list[tuple[Mapping[str, str], float]]]


class PrometheusSource:
    """Asks ``url`` for the series that carry ``trimtab_target`` = ``target``."""

    def __init__(self, url: str, target: str, names: MetricNames, window_s: float) -> None:
        self._url = url
        self._client = PrometheusConnect(url=url, disable_ssl=False)
        self._target = target
        self._names = names
        self._window_s = window_s

    async def window(self) -> TrafficWindow | None:
        series = await asyncio.to_thread(self._query)
        instances: dict[str, list[dict[str, Any]]] = {}
        for one in series:
            instances.setdefault(one["metric"].get("instance", ""), []).append(one)
        pairs = [self._pair(of_instance) for of_instance in instances.values()]
        return traffic_window([p for p in pairs if p is not None])

    def _query(self) -> list[dict[str, Any]]:
        wanted = {getattr(self._names, f.name) for f in fields(self._names)} - {None}
        pattern = "|".join(sorted(f"{name}(_bucket|_sum|_count)?" for name in wanted))
        query = f'{{__name__=~"{pattern}",trimtab_target="{escape_label(self._target)}"}}[{self._window_s:.0f}s]'
        try:
            answer: list[dict[str, Any]] = self._client.custom_query(query, timeout=10)
        except (PrometheusApiClientException, requests.RequestException) as error:
            raise MetricsError(f"Prometheus at {self._url}: {error}") from error
        return answer

    def _pair(self, series: Sequence[dict[str, Any]]) -> tuple[Figures, Figures] | None:
        """One replica's first and last reading inside the window."""
        times = sorted({float(at) for one in series for at, _ in one["values"]})
        if len(times) < 2:
            return None
        return self._at(series, times[0]), self._at(series, times[-1])

    def _at(self, series: Sequence[dict[str, Any]], at_unix_s: float) -> Figures:
        samples: _Samples = {}
        for one in series:
            for at, value in one["values"]:
                if abs(float(at) - at_unix_s) < 1e-3:
                    samples.setdefault(one["metric"]["__name__"], []).append((one["metric"], float(value)))
        return assemble(samples, self._names, at_unix_s)


def escape_label(value: str) -> str:
    """A label value inside PromQL's double quotes."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def write_targets(path: Path, target: str, replicas: Mapping[str, str]) -> None:
    """Writes the replicas (address → label) for Prometheus' ``file_sd_configs``, atomically."""
    groups = [
        {"targets": [address], "labels": {"trimtab_target": target, "replica": label}}
        for address, label in sorted(replicas.items())
    ]
    text = json.dumps(groups, indent=1)
    if path.exists() and path.read_text() == text:
        return
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
