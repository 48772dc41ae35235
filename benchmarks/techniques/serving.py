"""Serving requests from the benchmark's own thread, timed one by one; what the techniques share."""

from __future__ import annotations

import collections
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from trimtab.engine.adapters.embedded import CATALOGUE
from trimtab.engine.contract import KnobValue
from trimtab.engine.embedded.core import EngineCore
from trimtab.engine.embedded.generation import Emission, GenerationRequest, Queueing
from trimtab.engine.embedded.sampling import SamplingParams

QUANTIZATION = "int4"  # what a search chooses on two cores: the techniques are measured beside fast products


@dataclass(frozen=True, slots=True)
class Planned:
    """One request to be; ``at_s`` counts from the start."""

    at_s: float
    prompt_ids: tuple[int, ...]
    output_tokens: int


@dataclass(slots=True, eq=False)
class Served:
    """One request as its client sees it. Times are wall-clock seconds of the monotonic clock."""

    arrival_s: float
    emissions: list[Emission] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    num_tokens: int = 0

    def hear(self, emission: Emission) -> None:
        self.emissions.append(emission)
        if emission.token_ids:
            self.num_tokens += len(emission.token_ids)
            self.token_times_s.append(time.monotonic())

    @property
    def refused(self) -> bool:
        return bool(self.emissions) and self.emissions[-1].error is not None

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.arrival_s

    @property
    def tpot_s(self) -> float:
        return (self.token_times_s[-1] - self.token_times_s[0]) / max(1, self.num_tokens - 1)


def send(core: EngineCore, prompt_ids: Sequence[int], output_tokens: int, salt: str = "") -> Served:
    """Queues one greedy request of exactly ``output_tokens``."""
    params = SamplingParams(max_output_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    return submit(core, prompt_ids, params, salt)


def submit(core: EngineCore, prompt_ids: Sequence[int], params: SamplingParams, salt: str = "") -> Served:
    served = Served(time.monotonic())
    at_s, queueing = served.arrival_s, Queueing(cache_salt=salt)
    core.submit(GenerationRequest("benchmark", tuple(prompt_ids), params, at_s, at_s, served.hear, queueing))
    return served


def serve(core: EngineCore, planned: Sequence[Planned]) -> tuple[list[Served], float]:
    """Sends each request at its wall-clock time; returns all, and the seconds until the last ended."""
    served: list[Served] = []
    started_s = time.monotonic()
    coming = collections.deque(planned)
    while core.has_work or coming:
        while coming and started_s + coming[0].at_s <= time.monotonic():
            request = coming.popleft()
            served.append(send(core, request.prompt_ids, request.output_tokens))
            served[-1].arrival_s = started_s + request.at_s
        if core.has_work:
            core.step()
        else:
            time.sleep(max(0.0, started_s + coming[0].at_s - time.monotonic()))
    return served, time.monotonic() - started_s


def turn(core: EngineCore, **knobs: KnobValue) -> None:
    """Turns live knobs."""
    core.change(CATALOGUE.configuration(knobs, base=core.configuration))
