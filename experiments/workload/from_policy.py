"""From a policy's ``workload`` section to a workload. The CLI and the controller call it."""

from __future__ import annotations

from pathlib import Path

from trimtab.experiments.workload.interface import Workload
from trimtab.experiments.workload.synthetic import Arrivals, LogNormalTokens, SyntheticWorkload
from trimtab.experiments.workload.trace import read_trace
from trimtab.policies import manifest


def build_workload(spec: manifest.Workload, folder: Path, *, seed: int = 1) -> Workload:
    """``folder`` is the manifest's: a trace's path is relative to it. ``seed`` splits a trace.

    Raises:
        WorkloadError: the trace cannot be read.
    """
    if isinstance(spec, manifest.TraceWorkload):
        return read_trace(folder / spec.path, rate_per_s=spec.rate, seed=seed)
    return SyntheticWorkload(
        rate_per_s=spec.rate,
        arrivals=Arrivals(spec.arrivals.process, spec.arrivals.cv),
        prompt_tokens=_tokens(spec.promptTokens),
        output_tokens=_tokens(spec.outputTokens),
        seed=spec.seed,
    )


def _tokens(law: manifest.LogNormal) -> LogNormalTokens:
    return LogNormalTokens(law.median, law.sigma, law.max)
