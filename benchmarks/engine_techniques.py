"""What each of the engine's techniques brings on the real core, against doing without it, in one interleaved run."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

import torch

from benchmarks.core import add_model
from benchmarks.report import Row, finish, parser, run_rounds
from benchmarks.techniques import chat, kv_types, overload, prefix, pressure, speculation
from benchmarks.techniques.serving import QUANTIZATION
from trimtab.engine.embedded.loader import load_model

TECHNIQUES: Mapping[str, ModuleType] = {
    "kv_types": kv_types,
    "pressure": pressure,
    "prefix": prefix,
    "speculation": speculation,
    "chat": chat,
    "overload": overload,
}


def main() -> None:
    options = parser(__doc__)
    add_model(options)
    options.add_argument("--only", choices=sorted(TECHNIQUES), help="one technique (default: all)")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    loaded = load_model(arguments.model, QUANTIZATION)
    wanted = {n: t for n, t in TECHNIQUES.items() if arguments.only in (None, n)}

    def run_round(number: int) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, technique in wanted.items():
            measured = technique.measure(loaded, number, quick=arguments.quick)
            found |= {f"{name}: {case}": value for case, value in measured.items()}
        return found

    rounds = run_rounds(1 if arguments.quick else 5, run_round, arguments.json)
    made: list[Row] = []
    for name, technique in wanted.items():
        prefix_ = f"{name}: "
        own = [{k.removeprefix(prefix_): v for k, v in r.items() if k.startswith(prefix_)} for r in rounds]
        made += technique.rows(own)
    finish("engine_techniques", made, arguments.json)


if __name__ == "__main__":
    main()
