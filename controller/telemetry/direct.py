"""The metrics source for machines without Prometheus: scrapes each replica's ``/metrics`` itself."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import aiohttp

from trimtab.controller.telemetry.window import TrafficWindow, traffic_window
from trimtab.engine.contract import MetricNames
from trimtab.engine.scrape import Figures, scrape
from trimtab.errors import MetricsError


class DirectSource:
    """Keeps the readings of the last ``window_s`` a replica; every call takes one more."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        names: MetricNames,
        replicas: Callable[[], Sequence[str]],
        clock: Callable[[], float],
        window_s: float,
    ) -> None:
        self._http = http
        self._names = names
        self._replicas = replicas
        self._clock = clock
        self._window_s = window_s
        self._readings: dict[str, deque[Figures]] = {}

    async def window(self) -> TrafficWindow | None:
        urls = self._replicas()
        self._readings = {url: self._readings.get(url, deque()) for url in urls}
        # All at once: one that does not answer must not hold up the others.
        scrapes = [scrape(self._http, url, self._names, self._clock()) for url in urls]
        failures = []
        for url, figures in zip(urls, await asyncio.gather(*scrapes, return_exceptions=True), strict=True):
            kept = self._readings[url]
            if isinstance(figures, Figures):
                kept.append(figures)
            elif isinstance(figures, MetricsError):
                failures.append(str(figures))
            else:
                raise figures
            while len(kept) > 2 and kept[1].at_unix_s <= self._clock() - self._window_s:
                kept.popleft()
        if urls and len(failures) == len(urls):
            raise MetricsError("; ".join(failures))
        return traffic_window([(kept[0], kept[-1]) for kept in self._readings.values() if len(kept) > 1])
