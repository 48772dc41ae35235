"""One request on its way through the engine: what came in, what has come out, why it ended.

The HTTP side makes a ``GenerationRequest`` and receives ``Emission``s; the core turns tokens into them here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from trimtab.engine.embedded.records import Timeline
from trimtab.engine.embedded.sampling import SamplingParams
from trimtab.engine.embedded.scheduling.sequence import Sequence
from trimtab.engine.embedded.scoring import TokenScores
from trimtab.engine.embedded.speculation.adaptive import Acceptance
from trimtab.engine.embedded.speculation.ngram import NgramIndex
from trimtab.engine.embedded.stopping import StopMatcher
from trimtab.engine.embedded.tokenizer import IncrementalDetokenizer
from trimtab.errors import TrimtabError


class FinishReason(StrEnum):
    """Why an output ended. The first two are OpenAI's."""

    STOP = "stop"  # the model ended it, or a stop string was completed
    LENGTH = "length"  # max_tokens was reached
    ERROR = "error"  # it was refused or failed; ``Emission.error`` says why


@dataclass(frozen=True, slots=True)
class Emission:
    """What one step added to a request's output. ``finish`` is ``None`` while more follows.

    ``text`` may lag behind ``token_ids``: half characters and possible stop strings are held back.
    ``scores`` covers ``token_ids``; ``prompt_scores`` covers the prompt from its second token and comes once.
    ``num_cached_tokens`` says how much of the prompt came from the prefix cache.
    """

    text: str
    token_ids: tuple[int, ...]
    scores: TokenScores | None = None
    prompt_scores: TokenScores | None = None
    finish: FinishReason | None = None
    num_cached_tokens: int = 0
    error: TrimtabError | None = None

    @classmethod
    def failed(cls, error: TrimtabError) -> Emission:
        """The last emission of a request that ends without its output."""
        return cls("", (), finish=FinishReason.ERROR, error=error)


@dataclass(frozen=True, slots=True)
class Queueing:
    """What a request says about its place among others.

    ``priority``: the lower, the sooner. ``deadline_ms``: from its arrival; not admitted by then, it is refused.
    ``cache_salt``: it shares cached prefixes only with requests of the same salt.
    """

    priority: int = 0
    deadline_ms: int | None = None
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to continue. ``arrival_s`` is monotonic; ``deliver`` is called in the engine's thread."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_s: float
    arrival_unix_s: float
    deliver: Callable[[Emission], None]
    queueing: Queueing = field(default_factory=Queueing)


@dataclass(slots=True, eq=False)
class Generation:
    """A request while the engine holds it. Owned by the engine's thread."""

    request: GenerationRequest
    sequence: Sequence
    detokenizer: IncrementalDetokenizer
    stops: StopMatcher
    timeline: Timeline
    acceptance: Acceptance
    ngrams: NgramIndex = field(default_factory=NgramIndex)
    finish: FinishReason | None = None
    prompt_scores: list[TokenScores] = field(default_factory=list)
    _text: str = ""
    _token_ids: list[int] = field(default_factory=list)
    _scores: TokenScores | None = None

    def append(self, token_ids: list[int], scores: TokenScores | None, eos_ids: frozenset[int]) -> None:
        """Takes the tokens of one step, up to the one that ends the output; sets ``finish`` there."""
        for token_id in token_ids:
            if self.finish is not None:
                break
            self._take(token_id, eos_ids)
        self._scores = None if scores is None else scores.first(len(self._token_ids))

    def finish_without_output(self) -> None:
        """Ends a request that wanted its prompt scored and nothing more."""
        self.finish = FinishReason.LENGTH

    def take_emission(self) -> Emission:
        """What has been added since the last call."""
        prompt_scores = TokenScores.joined(self.prompt_scores) if self.prompt_scores else None
        num_cached = self.sequence.num_cached_tokens or 0
        emission = Emission(self._text, tuple(self._token_ids), self._scores, prompt_scores, self.finish, num_cached)
        self._text, self._token_ids, self._scores, self.prompt_scores = "", [], None, []
        return emission

    def _take(self, token_id: int, eos_ids: frozenset[int]) -> None:
        params = self.request.sampling
        self.sequence.token_ids.append(token_id)
        self._token_ids.append(token_id)
        if token_id in eos_ids and not params.ignore_eos:
            self.finish = FinishReason.STOP
            self._text += self.stops.push(self.detokenizer.flush())[0] + self.stops.flush()
            return
        text, stopped = self.stops.push(self.detokenizer.push(token_id))
        self._text += text
        if stopped:
            self.finish = FinishReason.STOP
        elif self.sequence.num_output_tokens >= params.max_output_tokens:
            self.finish = FinishReason.LENGTH
            text, stopped = self.stops.push(self.detokenizer.flush())
            self._text += text if stopped else text + self.stops.flush()
