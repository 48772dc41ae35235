"""An experiment's events in words and numbers, for the store, the page and the command line."""

from __future__ import annotations

from typing import Any

from trimtab.experiments.progress import (
    ConfirmRunFinished,
    ConfirmStarted,
    Event,
    SearchEnded,
    SearchStarted,
    TrialFinished,
    TrialStarted,
)


def told(event: Event) -> dict[str, Any]:
    """``told`` is a sentence, ``done_ratio`` the share of the present stage, ``seconds_left`` an estimate."""
    match event:
        case SearchStarted():
            resumed = f", {event.num_resumed} of them measured before" if event.num_resumed else ""
            return _line(f"searching over up to {event.num_trials} trials{resumed}", 0.0, event.seconds_left)
        case TrialStarted():
            return _line(
                f"trial {event.number} of {event.num_trials} ({event.origin}, {event.configuration.id})",
                (event.number - 1) / event.num_trials,
                event.seconds_left,
            )
        case TrialFinished():
            failure = event.outcome.failure
            end = (
                f"failed: {failure.message}"
                if failure
                else f"scored {event.score:.4g}"
                if event.score is not None
                else "has no score"
            )
            return _line(
                f"trial {event.number} of {event.num_trials} {end}",
                event.number / event.num_trials,
                event.seconds_left,
            )
        case SearchEnded():
            return _line(f"search ended after {event.num_measured} trials: {event.reason}", 1.0, None)
        case ConfirmStarted():
            number = len(event.finalists)
            return _line(
                f"confirming {number} finalist{'s' if number > 1 else ''} in {event.num_runs} runs",
                0.0,
                event.seconds_left,
            )
        case ConfirmRunFinished():
            return _line(
                f"confirmation run {event.run} of {event.num_runs}", event.run / event.num_runs, event.seconds_left
            )


def _line(sentence: str, done_ratio: float, seconds_left: float | None) -> dict[str, Any]:
    return {"told": sentence, "done_ratio": done_ratio, "seconds_left": seconds_left}
