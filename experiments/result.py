"""Everything about a finished experiment, as data that can be stored and read back."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import TypeAdapter

from trimtab.engine.contract import Configuration
from trimtab.experiments.confirm import Confirmation
from trimtab.experiments.study import TrialRecord
from trimtab.policies.promotion import Promotion


@dataclass(frozen=True, slots=True)
class Setting:
    """Under which conditions the figures were taken."""

    name: str
    objective: str  # such as "maximize goodput"
    unit: str
    workload: str
    content_known: bool
    model: str
    model_digest: str
    engine: str
    seed: int
    shared: str | None
    left_out: dict[str, str]
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class ExperimentResult:
    """Everything about a finished experiment. ``winner`` is ``None`` for "keep the incumbent"."""

    setting: Setting
    incumbent: Configuration
    default: Configuration
    records: tuple[TrialRecord, ...]
    confirmation: Confirmation
    winner: Configuration | None
    report: str  # Markdown

    @property
    def promotion(self) -> Promotion:
        """The decision, with its sentence."""
        return self.confirmation.promotion

    @property
    def sentence(self) -> str:
        """The decision in words with numbers."""
        return self.promotion.sentence

    def to_json(self) -> str:
        """For a file or a column; ``from_json`` reads it."""
        return _RESULT.dump_json(self, indent=1).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> ExperimentResult:
        """Raises pydantic's ``ValidationError`` for anything that ``to_json`` did not write."""
        return _RESULT.validate_json(text)


_RESULT = TypeAdapter(ExperimentResult)
