"""The Markdown report of an experiment. ``tune`` ends with it, ``experiment show`` prints it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from scipy import stats

from trimtab.engine.contract import Configuration
from trimtab.experiments.result import ExperimentResult
from trimtab.experiments.study import TrialRecord
from trimtab.policies.constraints import broken, describe
from trimtab.policies.figures import Percentiles, TrialFigures
from trimtab.policies.promotion import CONFIDENCE


def markdown(result: ExperimentResult) -> str:
    """The whole report. A pure function of the result."""
    sections = (
        _head(result),
        _comparison(result),
        _knobs(result),
        _trials(result),
        _failures(result),
        _setting(result),
    )
    return "\n\n".join(section for section in sections if section) + "\n"


def _head(result: ExperimentResult) -> str:
    num_measured = sum(r.counts for r in result.records)
    return (
        f"# Experiment {result.setting.name}\n\n**{result.promotion.sentence}**\n\n"
        f"Objective: {result.setting.objective}. {num_measured} trials were measured, "
        f"{len(result.confirmation.finalists)} finalists confirmed in {len(result.confirmation.runs)} runs."
    )


def _comparison(result: ExperimentResult) -> str:
    """Best, default and incumbent on held-out traffic where they were confirmed, else from the search."""
    named = [("incumbent", result.incumbent), ("default", result.default)]
    best = result.winner or next(iter(result.confirmation.finalists), None)
    if best is not None:
        named.insert(0, ("winner" if result.winner else "best finalist", best))
    rows = [
        (
            name,
            c.id,
            _confirmed_score(result, c) or _searched_score(result, c),
            *_figure_cells(_last_figures(result, c)),
        )
        for name, c in named
    ]
    header = (
        "",
        "configuration",
        result.setting.unit,
        "TTFT p50 / p95",
        "TPOT p50 / p95",
        "tokens/s",
        "errors",
        "KL",
    )
    note = (
        f"Intervals are {CONFIDENCE:.0%} t intervals over engine restarts on held-out traffic; figures beside them "
        "are those of the last run, at the workload's own rate."
    )
    return "## Best against default and incumbent\n\n" + _table(header, rows) + "\n\n" + note


def _confirmed_score(result: ExperimentResult, configuration: Configuration) -> str | None:
    runs = [r for r in result.confirmation.runs if r.outcome.configuration == configuration]
    scores = [r.score for r in runs if r.score is not None]
    if len(scores) < 2:
        return None
    mean = math.fsum(scores) / len(scores)
    deviation = math.sqrt(math.fsum((s - mean) ** 2 for s in scores) / (len(scores) - 1))
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(scores) - 1)) * deviation / math.sqrt(len(scores))
    return f"{mean:.3g} ({mean - half:.3g} to {mean + half:.3g}, {len(scores)} restarts)"


def _searched_score(result: ExperimentResult, configuration: Configuration) -> str:
    for record in result.records:
        if record.outcome.configuration == configuration and record.score is not None:
            return f"{record.score:.3g} (one trial, no interval)"
    return "not measured"


def _last_figures(result: ExperimentResult, configuration: Configuration) -> TrialFigures | None:
    outcomes = [*(r.outcome for r in result.records), *(r.outcome for r in result.confirmation.runs)]
    seen = [o.figures for o in outcomes if o.configuration == configuration and o.figures is not None]
    return seen[-1] if seen else None


def _figure_cells(figures: TrialFigures | None) -> tuple[str, ...]:
    if figures is None:
        return ("",) * 5
    load, quality = figures.load, figures.quality
    errors = "" if load.error_ratio is None else f"{load.error_ratio:.1%}"
    kl = "unknown" if quality is None else f"{round(quality.kl_nats, 6):.2g}"
    return _milliseconds(load.ttft_s), _milliseconds(load.tpot_s), f"{load.output_tokens_per_s:.1f}", errors, kl


def _milliseconds(seen: Percentiles | None) -> str:
    return "none" if seen is None else f"{seen.p50 * 1000:.0f} / {seen.p95 * 1000:.0f} ms"


def _knobs(result: ExperimentResult) -> str:
    best = result.winner or next(iter(result.confirmation.finalists), None)
    if best is None:
        return ""
    changed = best.changed(result.incumbent)
    rows = [(f"`{name}`", _value(old), _value(new)) for name, (new, old) in changed.items()]
    return f"## What {best.id} changes\n\n" + _table(("knob", "incumbent", best.id), rows)


def _trials(result: ExperimentResult) -> str:
    rows = [(str(r.number), r.origin, *_trial_cells(result, r)) for r in result.records]
    header = (
        "trial", "from", "differs from the incumbent in", result.setting.unit, "feasible",
        "TTFT p50 / p95", "TPOT p50 / p95", "tokens/s", "errors", "KL", "engine", "s",
    )  # fmt: skip
    return "## Every trial\n\n" + _table(header, rows)


def _trial_cells(result: ExperimentResult, record: TrialRecord) -> tuple[str, ...]:
    outcome = record.outcome
    changed = outcome.configuration.changed(result.incumbent)
    knobs = ", ".join(f"{name}={_value(new)}" for name, (new, _) in changed.items()) or "nothing"
    if record.duplicate_of is not None:
        return knobs, "", f"repeats trial {record.duplicate_of}", *("",) * 7
    if outcome.failure is not None:
        return knobs, "", f"failed: {outcome.failure.kind}", *("",) * 6, f"{outcome.duration_s:.0f}"
    faults = ", ".join(describe(n, outcome.constraints[n]) for n in broken(outcome.constraints))
    score = "" if record.score is None else f"{record.score:.3g}"
    engine = "new" if outcome.fresh_engine else "kept"
    cells = _figure_cells(outcome.figures)
    return knobs, score, f"no: {faults}" if faults else "yes", *cells, engine, f"{outcome.duration_s:.0f}"


def _failures(result: ExperimentResult) -> str:
    outcomes = [(f"trial {r.number}", r.outcome) for r in result.records if r.duplicate_of is None]
    outcomes += [(f"confirmation, round {r.round + 1}", r.outcome) for r in result.confirmation.runs]
    lines = [
        f"- {name} ({o.configuration.id}): {o.failure.kind}, in phase {o.failure.phase}: "
        + " ".join(o.failure.message.split())
        for name, o in outcomes
        if o.failure is not None
    ]
    return "## What failed and why\n\n" + ("\n".join(lines) if lines else "Nothing failed.")


def _setting(result: ExperimentResult) -> str:
    setting = result.setting
    lines = [
        f"- Workload: {setting.workload}; the confirmation used held-out traffic of the same kind.",
        f"- Shared: {setting.shared or 'nothing; engine and client had cores of their own'}.",
        f"- Model: {setting.model} (sha256 {setting.model_digest[:16]}), engine {setting.engine}.",
        f"- Seed: {setting.seed}. Versions: {', '.join(f'{k} {v}' for k, v in setting.versions.items())}.",
    ]
    if "goodput" in setting.objective:
        lines.append(
            "- Goodput: a staircase of rising rates from the workload's own, ended by the first that broke an SLO or "
            "oversaturated; interpolated between that one and the last that held."
        )
    if not setting.content_known:
        lines.append(
            "- The prompts are not the users': knobs whose effect depends on content were not decided here and are "
            "tuned live."
        )
    lines += [f"- Not searched: `{name}`: {reason}." for name, reason in setting.left_out.items()]
    return "## Setting\n\n" + "\n".join(lines)


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
