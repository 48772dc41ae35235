"""The engine core: one step takes every running sequence further.

``EngineCore`` is single-threaded; ``engine_thread`` drives it, tests and benchmarks step it directly.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trimtab.engine.adapters.embedded import CATALOGUE
from trimtab.engine.contract import ChangeCost, Configuration, RequestOutcome
from trimtab.engine.embedded.generation import Emission, Generation, GenerationRequest
from trimtab.engine.embedded.inject import Injection
from trimtab.engine.embedded.kv.cache import KVCache
from trimtab.engine.embedded.loader import LoadedModel
from trimtab.engine.embedded.metrics import EngineMetrics, Load
from trimtab.engine.embedded.records import Ending, RecordRing, Timeline
from trimtab.engine.embedded.runner import EntryRows, Runner, StepLogits
from trimtab.engine.embedded.sampling import Draw, sample
from trimtab.engine.embedded.scheduling.limits import SchedulerLimits
from trimtab.engine.embedded.scheduling.plan import ScheduledSequence, StepPlan
from trimtab.engine.embedded.scheduling.scheduler import Scheduler
from trimtab.engine.embedded.scheduling.sequence import Sequence
from trimtab.engine.embedded.scheduling.step_time import StepTimeModel
from trimtab.engine.embedded.scoring import score
from trimtab.engine.embedded.speculation.adaptive import AdaptiveDrafting, Candidate
from trimtab.engine.embedded.speculation.ngram import num_accepted
from trimtab.engine.embedded.stopping import StopMatcher
from trimtab.engine.embedded.tokenizer import IncrementalDetokenizer
from trimtab.errors import EngineError, KnobError, OverloadedError, TrimtabError

# By then a queue that was too long has moved on, with a small model.
RETRY_AFTER_S = 1


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Where the core reports what happened."""

    metrics: EngineMetrics
    records: RecordRing


@dataclass(frozen=True, slots=True)
class Clock:
    """Time as the core sees it; ``sleep`` serves fault injection only."""

    now_s: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class EngineCore:
    """Model, KV pool, scheduler and the requests in flight."""

    def __init__(
        self,
        loaded: LoadedModel,
        configuration: Configuration,
        telemetry: Telemetry,
        injection: Injection | None = None,
        clock: Clock | None = None,
        swap_file: Path | None = None,
    ) -> None:
        """Allocates the KV cache. Raises ``KnobError`` when it would not hold one page."""
        self.configuration = configuration
        self._tokenizer = loaded.tokenizer
        self.telemetry = telemetry
        self._injection = injection
        self._clock = clock or Clock()
        model = loaded.model
        cache = KVCache.allocate(model.config, model.kv_dtype, configuration, swap_file)
        self._step_time = StepTimeModel()
        self._drafting = AdaptiveDrafting(self._step_time)
        self.scheduler = Scheduler(cache.blocks, SchedulerLimits.of(configuration), self._step_time)
        self._runner = Runner(model, cache.pool, cache.blocks)
        self._cache = cache
        self._generations: dict[int, Generation] = {}
        self._sequence_ids = itertools.count()
        self._in_step: list[Generation] = []

    @property
    def has_work(self) -> bool:
        return bool(self._generations)

    @property
    def capacity_tokens(self) -> int:
        """The most tokens of prompt and output that one request may need."""
        return self.scheduler.blocks.capacity_tokens

    def step(self) -> None:
        """Takes all scheduled sequences further and delivers what came out of it."""
        started_s = self._clock.now_s()
        plan = self._schedule()
        if plan.entries:
            self._draft(plan)
            num_rows, num_pairs = plan.num_rows, plan.num_pairs
            wants_logits = any(not g.request.sampling.takes_most_likely for g in self._in_step)
            logits = self._runner.run(plan, wants_logits)
            sampled = self._sample(plan, logits)
            for entry, rows, tokens in zip(plan.entries, logits.rows, sampled, strict=True):
                self._append(entry, rows, tokens, logits)
            self._slow_down(plan, started_s)
            step_s = self._clock.now_s() - started_s
            self._step_time.observe(num_rows, num_pairs, step_s)
            self._emit(step_s)
        self.telemetry.metrics.count_plan(plan)
        self.report_load()

    def submit(self, request: GenerationRequest) -> None:
        """Queues a request. Raises ``RequestError`` when it can never fit."""
        params, queueing = request.sampling, request.queueing
        sequence = Sequence(
            sequence_id=next(self._sequence_ids),
            token_ids=list(request.prompt_ids),
            num_prompt_tokens=len(request.prompt_ids),
            max_output_tokens=params.max_output_tokens,
            arrival_s=request.arrival_s,
            deadline_s=None if queueing.deadline_ms is None else request.arrival_s + queueing.deadline_ms / 1000,
            priority=queueing.priority,
            cache_salt=queueing.cache_salt,
            scores_prompt=params.num_prompt_logprobs is not None,
        )
        self.scheduler.submit(sequence)
        self._generations[sequence.sequence_id] = Generation(
            request=request,
            sequence=sequence,
            detokenizer=IncrementalDetokenizer(self._tokenizer),
            stops=StopMatcher(params.stops),
            timeline=Timeline(request.arrival_s, request.arrival_unix_s),
            acceptance=self._drafting.new_sequence(),
        )
        self.report_load()

    def cancel(self, request: GenerationRequest) -> None:
        """Forgets a request whose client went away, and frees its blocks. Harmless when it has ended."""
        for generation in [g for g in self._generations.values() if g.request is request]:
            self._end(generation, RequestOutcome.CANCELLED)
        self.report_load()

    def fail_step(self, message: str) -> None:
        """Fails the requests of the step that raised (all of them when none was planned yet)."""
        failed = [g for g in self._in_step or self._generations.values() if self._holds(g)]
        self._in_step = []
        for generation in failed:
            self._fail(generation, EngineError(message))
        # Blocks may have been moved in part: nobody else's are to be trusted either.
        self.scheduler.forget_computed()
        self.telemetry.metrics.count_failed_step()
        self.report_load()

    def fail_all(self, message: str) -> None:
        """Fails every request: the engine cannot go on."""
        for generation in list(self._generations.values()):
            self._fail(generation, EngineError(message))
        self.report_load()

    def change(self, configuration: Configuration) -> None:
        """Puts live knobs in force; call it between steps. Raises ``KnobError`` when another knob differs."""
        if CATALOGUE.change_cost(self.configuration, configuration) not in (None, ChangeCost.LIVE):
            raise KnobError(f"not live: {', '.join(self.configuration.changed(configuration))}")
        self.configuration = configuration
        self.scheduler.limits = SchedulerLimits.of(configuration)
        self.report_load()

    def report_load(self) -> None:
        """Publishes the gauges."""
        scheduler = self.scheduler
        self.telemetry.metrics.set_load(
            Load(scheduler.num_running, scheduler.num_waiting, scheduler.blocks.usage_ratio, self._cache.used_bytes)
        )

    def _schedule(self) -> StepPlan:
        self._in_step = []
        now_s = self._clock.now_s()
        plan = self.scheduler.schedule(now_s)
        for refusal in plan.refused:
            error = OverloadedError(f"the engine is too busy: {refusal.reason}", retry_after_s=RETRY_AFTER_S)
            self._refuse(self._generations[refusal.sequence.sequence_id], error)
        self._in_step = [self._generation(e) for e in plan.entries]
        for sequence in plan.admitted:
            timeline = self._generations[sequence.sequence_id].timeline
            if timeline.admitted_s is None:
                timeline.admitted_s = now_s
                self.telemetry.metrics.count_prefix(sequence.num_prompt_tokens, sequence.num_cached_tokens or 0)
        return plan

    def _draft(self, plan: StepPlan) -> None:
        if self.configuration["speculative_method"] == "off":
            return
        wanted = int(self.configuration["speculative_k"])
        drafted: list[tuple[ScheduledSequence, list[int]]] = []
        for entry in plan.entries:
            sequence = entry.sequence
            # The last token that may come out needs no draft: the pass samples one beyond the drafts.
            num_left = sequence.max_output_tokens - sequence.num_output_tokens - 1
            if entry.completes and num_left > 0:
                drafts = self._generation(entry).ngrams.propose(sequence.token_ids, min(wanted, num_left))
                if drafts:
                    drafted.append((entry, drafts))
        counts = [len(drafts) for _, drafts in drafted]
        if self.configuration["speculative_adaptive"] == "on":
            candidates = [Candidate(self._generation(e).acceptance, len(drafts)) for e, drafts in drafted]
            counts = self._drafting.choose(candidates, plan.num_rows, plan.num_pairs)
        for (entry, drafts), count in zip(drafted, counts, strict=True):
            self.scheduler.grant_drafts(plan, entry, drafts[:count])

    def _sample(self, plan: StepPlan, logits: StepLogits) -> list[list[int]]:
        """The tokens drawn after each entry: none while it prefills, one more than its drafts otherwise."""
        if logits.logits is None:
            return [logits.most_likely[rows.sample.start : rows.sample.stop] for rows in logits.rows]
        draws: list[Draw] = []
        wanted: list[int] = []
        for entry, rows in zip(plan.entries, logits.rows, strict=True):
            sequence, params = entry.sequence, self._generation(entry).request.sampling
            for offset, row in enumerate(rows.sample):
                output_index = sequence.num_output_tokens + offset
                draws.append(Draw(params, sequence.num_prompt_tokens + output_index, output_index))
                wanted.append(row)
        everything = len(wanted) == len(logits.logits)
        drawn = iter(sample(logits.logits if everything else logits.logits[wanted], draws, self._tokenizer.eos_ids))
        return [list(itertools.islice(drawn, len(rows.sample))) for rows in logits.rows]

    def _append(self, entry: ScheduledSequence, rows: EntryRows, tokens: list[int], logits: StepLogits) -> None:
        """Books what the pass computed: prompt scores, accepted drafts and the token after them."""
        generation, sequence = self._generation(entry), entry.sequence
        params = generation.request.sampling
        if len(rows.score) and params.num_prompt_logprobs is not None and logits.logits is not None:
            until = rows.first_scored + len(rows.score)
            targets = sequence.token_ids[rows.first_scored : until]
            scored = logits.logits[rows.score.start : rows.score.stop]
            generation.prompt_scores.append(score(scored, targets, params.num_prompt_logprobs))
            sequence.num_scored_tokens = until
        completes = entry.completes
        num_kept = num_accepted(entry.drafts, tokens)
        self.scheduler.commit(entry, num_kept)
        if entry.drafts:
            self.telemetry.metrics.count_drafts(len(entry.drafts), num_kept)
            self._drafting.observe(generation.acceptance, len(entry.drafts), num_kept)
        if completes and tokens:
            kept, scores = tokens[: num_kept + 1], None
            if params.num_logprobs is not None and logits.logits is not None:
                start = rows.sample.start
                scores = score(logits.logits[start : start + len(kept)], kept, params.num_logprobs)
            generation.append(kept, scores, self._tokenizer.eos_ids)
        elif completes:
            generation.finish_without_output()
        self.scheduler.publish(sequence)

    def _slow_down(self, plan: StepPlan, started_s: float) -> None:
        if self._injection is not None and any(e.sequence.num_output_tokens > 1 for e in plan.entries):
            self._clock.sleep(self._injection.extra_s(self._clock.now_s() - started_s))

    def _emit(self, step_s: float) -> None:
        metrics, now_s = self.telemetry.metrics, self._clock.now_s()
        num_running = self.scheduler.num_running
        for generation in self._in_step:
            emission = generation.take_emission()
            if not emission.token_ids and emission.finish is None:
                generation.prompt_scores = [] if emission.prompt_scores is None else [emission.prompt_scores]
                continue
            if emission.token_ids:
                if generation.timeline.first_token_s is not None:
                    generation.timeline.note_decode_step(step_s, num_running)
                metrics.count_emission(len(emission.token_ids), generation.timeline.note_tokens(now_s))
            if emission.finish is not None:
                self._end(generation, RequestOutcome.SUCCEEDED)
            generation.request.deliver(emission)
        metrics.count_step(step_s)
        self._in_step = []

    def _fail(self, generation: Generation, error: TrimtabError) -> None:
        self._end(generation, RequestOutcome.FAILED)
        generation.request.deliver(Emission.failed(error))

    def _refuse(self, generation: Generation, error: OverloadedError) -> None:
        self._end(generation, RequestOutcome.REFUSED)
        generation.request.deliver(Emission.failed(error))

    def _end(self, generation: Generation, outcome: RequestOutcome) -> None:
        sequence = generation.sequence
        if outcome is RequestOutcome.SUCCEEDED:
            self.scheduler.finish(sequence)
        else:
            self.scheduler.remove(sequence)
        del self._generations[sequence.sequence_id]
        ending = Ending(
            generation.request.request_id, outcome, sequence.num_prompt_tokens, sequence.num_output_tokens
        )
        record = generation.timeline.record(ending, self._clock.now_s())
        self.telemetry.records.add(record)
        self.telemetry.metrics.count_ending(record)

    def _holds(self, generation: Generation) -> bool:
        return generation.sequence.sequence_id in self._generations

    def _generation(self, entry: ScheduledSequence) -> Generation:
        return self._generations[entry.sequence.sequence_id]
