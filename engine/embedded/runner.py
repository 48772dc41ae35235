"""From a plan to logits: lays the scheduled tokens out as one flat batch and runs the model over it.

Called by the core once a step. Which rows' logits are wanted, and for what, is decided here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from trimtab.engine.embedded.batch import StepBatch
from trimtab.engine.embedded.kv.allocator import BlockAllocator
from trimtab.engine.embedded.kv.pool import KVPool
from trimtab.engine.embedded.model import Model
from trimtab.engine.embedded.scheduling.plan import ScheduledSequence, StepPlan
from trimtab.kernels.attention import Span
from trimtab.kernels.kv_cache import BlockSlot


@dataclass(frozen=True, slots=True)
class EntryRows:
    """Rows of the step's logits that belong to one entry.

    ``score`` rows predict the prompt tokens from ``first_scored`` on; ``sample`` rows predict the first output token
    after the entry's tokens and, with drafts, one more token after each of them.
    """

    score: range
    first_scored: int
    sample: range


@dataclass(frozen=True, slots=True)
class StepLogits:
    """``rows`` has one item for each entry of the plan.

    ``most_likely`` is each row's first choice; ``logits`` is [num_rows, vocab] float32, ``None`` where not wanted.
    """

    most_likely: list[int]
    logits: Tensor | None
    rows: tuple[EntryRows, ...]


class Runner:
    """Runs plans on one model and one KV pool."""

    def __init__(self, model: Model, kv: KVPool, blocks: BlockAllocator) -> None:
        self._model = model
        self._kv = kv
        self._blocks = blocks

    def run(self, plan: StepPlan, wants_logits: bool) -> StepLogits:
        """Moves what the plan needs moved, then one pass over all entries, whose keys and values enter the pool."""
        self._kv.carry_out(self._blocks.take_moves())
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        logit_rows: list[int] = []
        spans: list[Span] = []
        rows: list[EntryRows] = []
        for entry in plan.entries:
            sequence = entry.sequence
            start = sequence.num_computed_tokens
            fed = sequence.token_ids[start : start + entry.num_tokens] + entry.drafts
            table = self._blocks.table(sequence.sequence_id)
            query_start, stop = len(token_ids), start + len(fed)
            token_ids += fed
            positions += range(start, stop)
            slots += [self._slot(table, position) for position in range(start, stop)]
            covering = table[: self._blocks.blocks_for(stop)]
            spans.append(Span(query_start, len(fed), stop, covering))
            rows.append(_wanted_rows(entry, query_start, logit_rows))
        batch = StepBatch(
            token_ids=np.array(token_ids, np.int32),
            positions=np.array(positions, np.int32),
            slots=np.array(slots, np.int32),
            spans=tuple(spans),
            logit_rows=np.array(logit_rows, np.int32),
            wants_logits=wants_logits,
        )
        output = self._model.forward(batch, self._kv)
        return StepLogits(output.most_likely, output.logits, tuple(rows))

    def _slot(self, table: tuple[BlockSlot, ...], position: int) -> int:
        size = self._blocks.block_size
        return table[position // size].number * size + position % size


def _wanted_rows(entry: ScheduledSequence, query_start: int, logit_rows: list[int]) -> EntryRows:
    """Appends the entry's batch rows whose logits are wanted; returns where they will be in the logits."""
    sequence = entry.sequence
    start = sequence.num_computed_tokens
    first_scored = max(sequence.num_scored_tokens, start + 1)
    stop_scored = min(start + entry.num_tokens + 1, sequence.num_prompt_tokens) if sequence.scores_prompt else 0
    num_before = len(logit_rows)
    # The row of position p predicts position p + 1.
    logit_rows += (query_start + position - 1 - start for position in range(first_scored, stop_scored))
    num_scored = len(logit_rows) - num_before
    if entry.completes and sequence.max_output_tokens > 0:
        last = query_start + entry.num_tokens - 1
        logit_rows += range(last, last + len(entry.drafts) + 1)
    scored_until = num_before + num_scored
    return EntryRows(range(num_before, scored_until), first_scored, range(scored_until, len(logit_rows)))
