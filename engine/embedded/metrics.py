"""The engine's Prometheus metrics, in a registry of their own, under the names that its adapter announces.

The core reports steps, tokens and endings here; ``GET /metrics`` renders. Every sequence counts as one request: an
HTTP request with several prompts is several. OpenTelemetry's GenAI names are used where one exists.
"""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest

from trimtab.engine.adapters.embedded import METRIC_NAMES
from trimtab.engine.contract import RequestOutcome, RequestRecord
from trimtab.engine.embedded.scheduling.plan import StepPlan

# 1 ms to about 180 s; neighbours differ by 1.4, so that a quantile read from the buckets is within 40 %.
SECONDS_BUCKETS = tuple(round(0.001 * 1.4**i, 6) for i in range(37))


@dataclass(frozen=True, slots=True)
class Load:
    """What the engine holds at this moment."""

    num_running: int
    num_waiting: int
    kv_usage_ratio: float
    kv_used_bytes: int


class EngineMetrics:
    """All metrics of one engine. Safe to use from several threads."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        names = METRIC_NAMES
        self._ttft = self._histogram(names.ttft_s, "Arrival at the HTTP handler to the first output token.")
        self._tpot = self._histogram(names.tpot_s, "Mean time of an output token after the first, a request.")
        self._itl = self._histogram(names.itl_s, "Time between successive emissions of one request.")
        self._duration = self._histogram(names.duration_s, "Arrival to the last output token.")
        self._queue = self._histogram(names.queue_s, "Arrival to the first admission.")
        self._step = self._histogram(names.step_s, "Duration of one engine step.")
        self._running = self._gauge(names.running, "Sequences that take part in steps.")
        self._waiting = self._gauge(names.waiting, "Sequences that wait for admission.")
        self._kv_usage = self._gauge(names.kv_usage_ratio, "Share of the usable KV pool that sequences own.")
        self._kv_used = self._gauge("trimtab_engine_kv_used_bytes", "The KV pool in use, cached prefixes included.")
        self._preemptions = self._counter(names.preemptions, "Sequences that gave their KV blocks up for others.")
        self._swapped = self._counter("trimtab_engine_swapped_sequences", "Of those, the ones swapped out.")
        self._compressed = self._counter("trimtab_engine_compressed_blocks", "KV blocks compressed to int8.")
        self._prefix_lookups = self._counter(
            names.prefix_lookup_tokens, "Prompt tokens looked up in the prefix cache."
        )
        self._prefix_hits = self._counter(names.prefix_hit_tokens, "Of those, the ones that needed no computing.")
        self._prompt_tokens = self._counter(names.prompt_tokens, "Prompt tokens of finished requests.")
        self._output_tokens = self._counter(names.output_tokens, "Output tokens sampled.")
        self._draft_tokens = self._counter(names.draft_tokens, "Draft tokens verified.")
        self._accepted_tokens = self._counter(names.accepted_tokens, "Draft tokens accepted.")
        self._requests = Counter(
            _known(names.requests), "Requests by how they ended.", ["outcome"], registry=self.registry
        )
        for outcome in RequestOutcome:
            self._requests.labels(outcome=outcome.value)
        self._failed_steps = Counter(
            "trimtab_engine_failed_steps", "Steps that raised and failed their requests.", registry=self.registry
        )
        self._info = Info("trimtab_engine", "What this engine runs.", registry=self.registry)

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)

    def set_info(self, labels: dict[str, str]) -> None:
        self._info.info(labels)

    def set_load(self, load: Load) -> None:
        self._running.set(load.num_running)
        self._waiting.set(load.num_waiting)
        self._kv_usage.set(load.kv_usage_ratio)
        self._kv_used.set(load.kv_used_bytes)

    def count_step(self, step_s: float) -> None:
        self._step.observe(step_s)

    def count_plan(self, plan: StepPlan) -> None:
        """Counts what the scheduler did to make room."""
        self._preemptions.inc(len(plan.preempted))
        self._swapped.inc(len(plan.swapped))
        self._compressed.inc(plan.num_compressed_blocks)

    def count_prefix(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Counts one prompt's look-up in the prefix cache."""
        self._prefix_lookups.inc(num_prompt_tokens)
        self._prefix_hits.inc(num_cached_tokens)

    def count_failed_step(self) -> None:
        self._failed_steps.inc()

    def count_drafts(self, num_drafts: int, num_accepted: int) -> None:
        self._draft_tokens.inc(num_drafts)
        self._accepted_tokens.inc(num_accepted)

    def count_emission(self, num_tokens: int, itl_s: float | None) -> None:
        """Counts tokens that came out together; ``itl_s`` is ``None`` for a request's first."""
        self._output_tokens.inc(num_tokens)
        if itl_s is not None:
            self._itl.observe(itl_s)

    def count_ending(self, record: RequestRecord) -> None:
        """Counts a finished request; only a success enters the latency histograms."""
        self._requests.labels(outcome=record.outcome.value).inc()
        self._prompt_tokens.inc(record.prompt_tokens)
        if record.outcome is not RequestOutcome.SUCCEEDED:
            return
        self._duration.observe(record.duration_s)
        for histogram, value_s in (
            (self._ttft, record.ttft_s),
            (self._tpot, record.tpot_s),
            (self._queue, record.queue_s),
        ):
            if value_s is not None:
                histogram.observe(value_s)

    def _histogram(self, name: str | None, doc: str) -> Histogram:
        return Histogram(_known(name), doc, buckets=SECONDS_BUCKETS, registry=self.registry)

    def _gauge(self, name: str | None, doc: str) -> Gauge:
        return Gauge(_known(name), doc, registry=self.registry)

    def _counter(self, name: str | None, doc: str) -> Counter:
        return Counter(_known(name), doc, registry=self.registry)


def _known(name: str | None) -> str:
    assert name is not None, "this engine exports every metric of the contract"
    return name
