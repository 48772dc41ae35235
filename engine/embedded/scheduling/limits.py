"""The live knobs of scheduling as the scheduler uses them. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from trimtab.engine.contract import Configuration


class PressureAction(StrEnum):
    """What makes room above the high watermark, until the low one is reached."""

    COMPRESS = "compress"  # cold blocks of running sequences become int8
    SWAP = "swap"  # victims' blocks go to the swap space and come back; with that full, as recompute
    RECOMPUTE = "recompute"  # victims give their blocks back and are computed again


class SchedulingPolicy(StrEnum):
    """Who comes first, among those that wait and among the prompts in flight."""

    FCFS = "fcfs"
    PRIORITY = "priority"  # the request's priority, then its deadline
    SHORTEST_PREFILL_FIRST = "shortest_prefill_first"


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """``adapters.embedded.CATALOGUE`` says what each knob means."""

    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk_tokens: int
    max_prefill_tokens: int
    max_decode_seqs: int
    max_step_s: float
    kv_high_watermark: float
    kv_low_watermark: float
    kv_usable_ratio: float
    kv_pressure_action: PressureAction
    scheduling_policy: SchedulingPolicy
    ageing_s: float
    max_queue_s: float
    prefix_cache: bool

    @classmethod
    def of(cls, configuration: Configuration) -> SchedulerLimits:
        return cls(
            max_num_seqs=int(configuration["max_num_seqs"]),
            max_num_batched_tokens=int(configuration["max_num_batched_tokens"]),
            prefill_chunk_tokens=int(configuration["prefill_chunk_tokens"]),
            max_prefill_tokens=int(configuration["max_prefill_tokens"]),
            max_decode_seqs=int(configuration["max_decode_seqs"]),
            max_step_s=int(configuration["max_step_ms"]) / 1000,
            kv_high_watermark=float(configuration["kv_high_watermark"]),
            kv_low_watermark=float(configuration["kv_low_watermark"]),
            kv_usable_ratio=float(configuration["kv_usable_ratio"]),
            kv_pressure_action=PressureAction(str(configuration["kv_pressure_action"])),
            scheduling_policy=SchedulingPolicy(str(configuration["scheduling_policy"])),
            ageing_s=int(configuration["ageing_ms"]) / 1000,
            max_queue_s=int(configuration["max_queue_ms"]) / 1000,
            prefix_cache=configuration["prefix_cache"] == "on",
        )
