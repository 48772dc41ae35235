"""The embedded engine as the control plane sees it: knobs, command line, metric names, admin calls. No torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from trimtab.engine.adapters.interface import Command, DrainState, EngineClient, Launch, RecordPage
from trimtab.engine.contract import (
    ChangeCost,
    ChoiceKnob,
    Configuration,
    EngineEndpoint,
    FloatKnob,
    IntKnob,
    KnobCatalogue,
    KnobValue,
    MetricNames,
    RequestOutcome,
    RequestRecord,
)
from trimtab.errors import EngineCallError, KnobError

MIB = 1024 * 1024
# An engine answers from its event loop, however long its step is; a page of records takes it a while to write.
PROBE_TIMEOUT_S = 1.5
READ_TIMEOUT_S = 3.0
CHANGE_TIMEOUT_S = 10.0  # a change waits for the end of a step
ADMIN_TOKEN_VARIABLE = "TRIMTAB_ENGINE_ADMIN_TOKEN"

_AnswerT = TypeVar("_AnswerT")

CATALOGUE = KnobCatalogue(
    engine="embedded",
    knobs=(
        ChoiceKnob(
            "quantization",
            ("fp32", "bf16", "int8", "int4"),
            "bf16",
            ChangeCost.REQUANTIZE,
            "How weights are stored and multiplied.",
        ),
        IntKnob(
            "kv_cache_bytes",
            16 * MIB,
            16384 * MIB,
            512 * MIB,
            "bytes",
            ChangeCost.RESTART,
            "Memory for the paged KV pool, allocated once at start.",
            log=True,
        ),
        ChoiceKnob(
            "kv_cache_dtype",
            ("auto", "int8", "int4"),
            "auto",
            ChangeCost.RESTART,
            "How new keys and values are stored: as computed, or compressed with a scale a head and token.",
        ),
        IntKnob(
            "kv_swap_bytes",
            16 * MIB,
            65536 * MIB,
            256 * MIB,
            "bytes",
            ChangeCost.RESTART,
            "Room for KV blocks that are swapped out, taken as it is used.",
            log=True,
        ),
        IntKnob("block_size", 8, 128, 16, "tokens", ChangeCost.RESTART, "Tokens in one KV block.", log=True),
        IntKnob(
            "max_num_seqs",
            1,
            256,
            32,
            "sequences",
            ChangeCost.LIVE,
            "Sequences that may run in one step; more wait.",
            log=True,
        ),
        IntKnob(
            "max_num_batched_tokens",
            16,
            8192,
            512,
            "tokens",
            ChangeCost.LIVE,
            "Token budget of one step, over decode and prefill together.",
            log=True,
        ),
        IntKnob(
            "prefill_chunk_tokens",
            16,
            8192,
            256,
            "tokens",
            ChangeCost.LIVE,
            "The most prompt tokens that one sequence may prefill in one step.",
            log=True,
        ),
        IntKnob(
            "max_prefill_tokens",
            16,
            8192,
            8192,
            "tokens",
            ChangeCost.LIVE,
            "The most prompt tokens of all sequences in one step.",
            log=True,
        ),
        IntKnob(
            "max_decode_seqs",
            1,
            256,
            256,
            "sequences",
            ChangeCost.LIVE,
            "The most sequences that decode in one step; more take turns.",
            log=True,
        ),
        IntKnob(
            "max_step_ms",
            1,
            60_000,
            60_000,
            "ms",
            ChangeCost.LIVE,
            "While sequences decode, prefill chunks shrink until a step is expected to take no longer.",
            log=True,
        ),
        ChoiceKnob(
            "scheduling_policy",
            ("fcfs", "priority", "shortest_prefill_first"),
            "fcfs",
            ChangeCost.LIVE,
            "Who is admitted and prefilled first: by arrival, by the request's priority and deadline, or by what is "
            "left to prefill.",
        ),
        IntKnob(
            "ageing_ms",
            10,
            600_000,
            2_000,
            "ms",
            ChangeCost.LIVE,
            "A sequence that came this long ago is before all later ones, whatever the policy.",
            log=True,
        ),
        IntKnob(
            "max_queue_ms",
            10,
            600_000,
            600_000,
            "ms",
            ChangeCost.LIVE,
            "A request that waits longer for its admission is refused (429).",
            log=True,
        ),
        ChoiceKnob(
            "prefix_cache",
            ("off", "on"),
            "on",
            ChangeCost.LIVE,
            "Whether prompts that begin alike share their KV blocks.",
        ),
        FloatKnob(
            "kv_usable_ratio",
            0.05,
            1.0,
            1.0,
            "share of the pool",
            ChangeCost.LIVE,
            "How much of the reserved KV pool may be used.",
        ),
        ChoiceKnob(
            "kv_pressure_action",
            ("compress", "swap", "recompute"),
            "recompute",
            ChangeCost.LIVE,
            "What makes room above the high watermark until the low one: cold blocks become int8, or sequences give "
            "their blocks up, to the swap space or to be computed again.",
        ),
        FloatKnob(
            "kv_high_watermark",
            0.1,
            1.0,
            0.95,
            "share of the usable pool",
            ChangeCost.LIVE,
            "With more of the usable pool in use, admission stops and the pressure action starts.",
        ),
        FloatKnob(
            "kv_low_watermark",
            0.05,
            1.0,
            0.85,
            "share of the usable pool",
            ChangeCost.LIVE,
            "With no more than this in use, admission resumes and the pressure action ends.",
        ),
        ChoiceKnob(
            "speculative_method",
            ("off", "ngram"),
            "off",
            ChangeCost.LIVE,
            "How drafts are made: not at all, or by looking the last tokens up in prompt and output.",
        ),
        IntKnob("speculative_k", 1, 7, 3, "tokens", ChangeCost.LIVE, "The most draft tokens verified in one pass."),
        ChoiceKnob(
            "speculative_adaptive",
            ("off", "on"),
            "on",
            ChangeCost.LIVE,
            "Whether fewer drafts are verified, down to none, where they would not pay.",
        ),
        IntKnob("num_threads", 1, 64, 1, "threads", ChangeCost.RESTART, "CPU threads of the tensor operations."),
    ),
    ordered=(("kv_low_watermark", "kv_high_watermark"),),
)

METRIC_NAMES = MetricNames(
    ttft_s="gen_ai_server_time_to_first_token_seconds",
    tpot_s="gen_ai_server_time_per_output_token_seconds",
    itl_s="trimtab_engine_inter_token_latency_seconds",
    duration_s="gen_ai_server_request_duration_seconds",
    queue_s="trimtab_engine_queue_seconds",
    running="trimtab_engine_running_requests",
    waiting="trimtab_engine_waiting_requests",
    kv_usage_ratio="trimtab_engine_kv_usage_ratio",
    prefix_lookup_tokens="trimtab_engine_prefix_lookup_tokens_total",
    prefix_hit_tokens="trimtab_engine_prefix_hit_tokens_total",
    preemptions="trimtab_engine_preemptions_total",
    prompt_tokens="trimtab_engine_prompt_tokens_total",
    output_tokens="trimtab_engine_output_tokens_total",
    requests="trimtab_engine_requests_total",
    draft_tokens="trimtab_engine_draft_tokens_total",
    accepted_tokens="trimtab_engine_accepted_tokens_total",
    step_s="trimtab_engine_step_seconds",
)


@dataclass(frozen=True, slots=True)
class EmbeddedAdapter:
    """The adapter of ``trimtab engine serve``."""

    catalogue: KnobCatalogue = CATALOGUE
    metric_names: MetricNames = METRIC_NAMES
    memory_exit_codes: tuple[int, ...] = (5,)

    def command(self, launch: Launch) -> Command:
        argv = [
            sys.executable, "-m", "trimtab.engine.embedded", "serve",
            "--model", str(launch.model_path),
            "--model-name", launch.model_name,
            "--port", str(launch.port),
            "--admin-port", str(launch.admin_port),
            "--knobs", launch.configuration.canonical_json,
        ]  # fmt: skip
        if launch.inject is not None:
            argv += ["--inject", launch.inject]
        threads = str(launch.configuration["num_threads"])
        return Command(tuple(argv), {ADMIN_TOKEN_VARIABLE: launch.admin_token, "OMP_NUM_THREADS": threads})

    def client(self, http: aiohttp.ClientSession, endpoint: EngineEndpoint) -> EngineClient:
        return _EmbeddedClient(http, endpoint)


@dataclass(frozen=True, slots=True)
class _EmbeddedClient:
    http: aiohttp.ClientSession
    endpoint: EngineEndpoint

    async def is_ready(self) -> bool:
        try:
            async with self.http.get(
                f"{self.endpoint.base_url}/ready", timeout=_timeout(PROBE_TIMEOUT_S)
            ) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def set_live_knobs(self, values: Mapping[str, KnobValue]) -> Configuration:
        return await self._admin("PATCH", "/admin/knobs", _configuration, json=dict(values))

    async def set_draining(self, draining: bool) -> DrainState:
        return await self._admin("POST" if draining else "DELETE", "/admin/drain", _drain_state)

    async def drain_state(self) -> DrainState:
        return await self._admin("GET", "/admin/drain", _drain_state, timeout_s=PROBE_TIMEOUT_S)

    async def records_since(self, cursor: int) -> RecordPage:
        since = {"since": str(cursor)}
        return await self._admin("GET", "/admin/records", _record_page, timeout_s=READ_TIMEOUT_S, params=since)

    async def _admin(
        self,
        method: str,
        path: str,
        read: Callable[[Any], _AnswerT],
        timeout_s: float = CHANGE_TIMEOUT_S,
        **arguments: Any,
    ) -> _AnswerT:
        """One call, its JSON answer read by ``read``. An engine of another version may answer what we cannot read."""
        headers = {"Authorization": f"Bearer {self.endpoint.admin_token}"}
        url = f"{self.endpoint.admin_url}{path}"
        try:
            async with self.http.request(
                method, url, headers=headers, timeout=_timeout(timeout_s), **arguments
            ) as response:
                text = await response.text()
                if response.status != 200:
                    raise EngineCallError(f"{method} {url} answered {response.status}: {text[:300]}")
                return read(json.loads(text))
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError, KnobError) as error:
            raise EngineCallError(f"{method} {url}: {type(error).__name__}: {error}") from error


def _configuration(body: Any) -> Configuration:
    return CATALOGUE.configuration(body["knobs"])


def _drain_state(body: Any) -> DrainState:
    return DrainState(body["draining"], body["num_in_flight"])


def _record_page(body: Any) -> RecordPage:
    records = tuple(RequestRecord(**{**r, "outcome": RequestOutcome(r["outcome"])}) for r in body["records"])
    return RecordPage(records, body["next_cursor"], body["num_dropped"])


def _timeout(total_s: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=total_s)
