"""Live figures: differences of readings, resets, missing data; both sources agree, against a real Prometheus."""

import asyncio
import math
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from trimtab.controller.telemetry.direct import DirectSource
from trimtab.controller.telemetry.prometheus import PrometheusSource, escape_label, write_targets
from trimtab.controller.telemetry.window import Percentile, traffic_window
from trimtab.engine.adapters.embedded import METRIC_NAMES
from trimtab.engine.process import ProcessSpec, spawn, terminate
from trimtab.engine.scrape import Figures
from trimtab.engine.scrape import Histogram as HistogramFigures
from trimtab.errors import MetricsError


def figures(at: float, tokens: float, counts: tuple[float, ...] = (0, 0, 0)) -> Figures:
    histogram = HistogramFigures((0.1, 0.2, math.inf), counts, 0.0)
    return Figures(at, {"output_tokens": tokens, "requests.succeeded": tokens / 10}, {"ttft_s": histogram})


def test_a_window_is_the_difference_of_two_readings() -> None:
    window = traffic_window([(figures(0, 100, (5, 5, 5)), figures(10, 300, (6, 105, 105)))])
    assert window is not None
    assert window.output_tokens_per_s == 20
    assert window.requests_per_s == 2
    assert window.error_ratio == 0
    assert window.ttft_p95 == Percentile(0.1, 0.2)
    assert window.tpot_p95 is None
    assert window.running is None


def test_a_reset_counts_what_came_after_it() -> None:
    window = traffic_window([(figures(0, 1000, (50, 50, 50)), figures(10, 50, (3, 3, 4)))])
    assert window is not None
    assert window.output_tokens_per_s == 5
    assert window.ttft_p95 == Percentile(0.2, None)


def test_no_readings_make_no_window_and_no_requests_no_percentile() -> None:
    assert traffic_window([]) is None
    assert traffic_window([(figures(5, 1), figures(5, 1))]) is None
    window = traffic_window([(figures(0, 1), figures(5, 1))])
    assert window is not None
    assert window.ttft_p95 is None
    assert window.error_ratio is None


class Exporter:
    """A real exposition under /metrics with the embedded engine's names."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("trimtab_engine_requests", "", ["outcome"], registry=self.registry)
        self.tokens = Counter("trimtab_engine_output_tokens", "", registry=self.registry)
        self.running = Gauge("trimtab_engine_running_requests", "", registry=self.registry)
        self.ttft = Histogram(
            "gen_ai_server_time_to_first_token_seconds", "", buckets=[0.1, 0.2, 0.4], registry=self.registry
        )

    def serve_one(self) -> None:
        self.requests.labels("succeeded").inc()
        self.tokens.inc(64)
        self.running.set(3)
        self.ttft.observe(0.15)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@asynccontextmanager
async def exporting(exporter: Exporter) -> AsyncIterator[int]:
    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(exporter.registry), content_type="text/plain")

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield port
    finally:
        await runner.cleanup()


async def test_the_direct_source_keeps_a_sliding_window() -> None:
    exporter, now = Exporter(), [100.0]
    async with exporting(exporter) as port, aiohttp.ClientSession() as http:
        source = DirectSource(http, METRIC_NAMES, lambda: [f"http://127.0.0.1:{port}"], lambda: now[0], 30)
        assert await source.window() is None
        for _ in range(10):
            now[0] += 10
            exporter.serve_one()
            window = await source.window()
        assert window is not None
        assert window.duration_s == 30
        assert window.output_tokens_per_s == pytest.approx(64 * 3 / 30)


async def test_an_unreachable_replica_is_an_error_only_when_it_is_the_only_one() -> None:
    exporter = Exporter()
    async with exporting(exporter) as port, aiohttp.ClientSession() as http:
        dead = f"http://127.0.0.1:{free_port()}"
        alive = f"http://127.0.0.1:{port}"
        await DirectSource(http, METRIC_NAMES, lambda: [alive, dead], time.time, 30).window()
        with pytest.raises(MetricsError, match=dead):
            await DirectSource(http, METRIC_NAMES, lambda: [dead], time.time, 30).window()


@pytest.mark.prometheus
async def test_both_sources_agree_on_a_real_prometheus(tmp_path: Path) -> None:
    exporter, port = Exporter(), free_port()
    async with exporting(exporter) as exported, aiohttp.ClientSession() as http:
        targets = tmp_path / "targets.json"
        write_targets(targets, 'a "target"', {f"127.0.0.1:{exported}": "stable"})
        (tmp_path / "prometheus.yml").write_text(
            "global: {scrape_interval: 1s, scrape_timeout: 1s}\n"
            f"scrape_configs: [{{job_name: trimtab, file_sd_configs: [{{files: ['{targets}']}}]}}]\n"
        )
        argv = (
            "prometheus",
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        )
        server = spawn(ProcessSpec(argv, {}, (), tmp_path / "prometheus.log"), lambda _: None)
        try:
            source = PrometheusSource(f"http://127.0.0.1:{port}", 'a "target"', METRIC_NAMES, 60)
            direct = DirectSource(http, METRIC_NAMES, lambda: [f"http://127.0.0.1:{exported}"], time.time, 60)
            other = PrometheusSource(f"http://127.0.0.1:{port}", "another", METRIC_NAMES, 60)
            await direct.window()
            window = None
            deadline = time.monotonic() + 60
            while window is None or window.duration_s < 8:
                assert time.monotonic() < deadline
                exporter.serve_one()
                await asyncio.sleep(0.2)
                try:
                    window = await source.window()
                except MetricsError:  # not listening yet
                    continue
            direct_window = await direct.window()
            assert direct_window is not None
            assert await other.window() is None
            assert window.running == direct_window.running == 3
            assert window.ttft_p95 == direct_window.ttft_p95 == Percentile(0.1, 0.2)
            assert window.error_ratio == direct_window.error_ratio == 0
            # The same steady stream seen over spans that start and end up to a scrape apart.
            assert window.requests_per_s == pytest.approx(direct_window.requests_per_s, rel=0.25)
        finally:
            terminate(server, grace_s=5)


async def test_a_prometheus_that_is_not_there_is_one_error() -> None:
    with pytest.raises(MetricsError, match="Prometheus at"):
        await PrometheusSource(f"http://127.0.0.1:{free_port()}", "x", METRIC_NAMES, 60).window()


def test_label_values_are_escaped() -> None:
    assert escape_label('a"b\\c\nd') == 'a\\"b\\\\c\\nd'
