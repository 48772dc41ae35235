"""The other load generator: runs ``guidellm`` from an environment of its own and reads its report."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

_TIMEOUT_S = 300.0
_ATTEMPTS = 4
# By default it starts 10 worker processes, which take a core from a small machine while they start. Its telemetry and
# its tokenizer look-ups must not wait for a network.
_ENVIRONMENT = {"GUIDELLM__MAX_WORKER_PROCESSES": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


@dataclass(frozen=True, slots=True)
class ClientFigures:
    """What one client says of one load. Latencies are medians over requests."""

    ttft_s: float
    tpot_s: float
    output_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class GuidellmLoad:
    """What to send. ``profile`` is guidellm's own, such as ``kind=constant,rate=0.5``."""

    base_url: str
    model: str
    profile: str
    prompts: tuple[str, ...]
    prompt_tokens: int
    output_tokens: int


class Guidellm:
    """The installed command and the tokenizer that it insists on."""

    def __init__(self, binary: Path, tokenizer: Path, folder: Path) -> None:
        """``folder`` receives its input and its report."""
        self._binary = binary
        self._tokenizer = tokenizer
        self._folder = folder

    @property
    def version(self) -> str:
        ended = subprocess.run([self._binary, "--version"], capture_output=True, text=True, check=True)
        return ended.stdout.strip().rsplit(maxsplit=1)[-1]

    def run(self, load: GuidellmLoad) -> ClientFigures:
        """Raises ``SystemExit`` when it fails, or when no attempt sent the planned requests.

        It sometimes ends a run one request short; such a run says nothing of the planned load and is made again.
        """
        for _ in range(_ATTEMPTS):
            benchmark = self._benchmark(load)
            requests = benchmark["requests"]["successful"]
            lengths = {(r["prompt_tokens"], r["output_tokens"]) for r in requests}
            if len(requests) == len(load.prompts) and lengths == {(load.prompt_tokens, load.output_tokens)}:
                return _read(benchmark)
        totals = benchmark["metrics"]["request_totals"]
        raise SystemExit(f"guidellm's load is not the planned one: requests {totals}, lengths {sorted(lengths)}")

    def _benchmark(self, load: GuidellmLoad) -> dict[str, Any]:
        data, report = self._folder / "prompts.jsonl", self._folder / "report.json"
        lines = [json.dumps({"prompt": p, "output_tokens_count": load.output_tokens}) for p in load.prompts]
        data.write_text(
            "\n".join(lines * 2) + "\n"
        )  # it ends a request short more often when the data ends with them
        command = self._command(load, data, report)
        ended = subprocess.run(
            command, env={**os.environ, **_ENVIRONMENT}, cwd=self._folder, timeout=_TIMEOUT_S,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        if ended.returncode != 0:
            raise SystemExit(f"guidellm ended with {ended.returncode}:\n{ended.stdout[-2000:]}")
        benchmark: dict[str, Any] = json.loads(report.read_text())["benchmarks"][0]
        report.unlink()
        return benchmark

    def _command(self, load: GuidellmLoad, data: Path, report: Path) -> list[str]:
        backend = {
            "kind": "openai_http",
            "target": load.base_url,
            "model": load.model,
            "request_format": "/v1/completions",
            "extras": {"body": {"temperature": 0}},
        }
        return [
            str(self._binary), "run", "--backend", json.dumps(backend), "--profile", load.profile,
            "--constraint", f"kind=max_requests,count={len(load.prompts)}",
            "--tokenizer", f"kind=hf_auto,model={self._tokenizer}", "--data", f"kind=json_file,path={data}",
            "--output", f"kind=json,path={report}", "--disable-console",
        ]  # fmt: skip


def _read(benchmark: dict[str, Any]) -> ClientFigures:
    metrics, requests = benchmark["metrics"], benchmark["requests"]["successful"]
    return ClientFigures(
        ttft_s=median(r["time_to_first_token_ms"] for r in requests) / 1000,
        # Its "inter-token latency" is (last - first) / (n - 1), which is our TPOT; its "time per output token" is the
        # whole request's time over n, the first token included.
        tpot_s=median(r["inter_token_latency_ms"] for r in requests) / 1000,
        output_tokens_per_s=metrics["output_tokens_per_second"]["successful"]["mean"],
    )
