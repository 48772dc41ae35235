"""FakeHost: trial engines that are FakeEngines in this process, whose timings follow their knobs. For tests."""

from collections.abc import Callable

from trimtab.engine.contract import Configuration
from trimtab.engine.fake_server import FakeEngine, FakeScript
from trimtab.errors import EngineStartError
from trimtab.experiments.ports import HostedEngine

DRIFT = {"fp32": 0.0, "bf16": 0.02, "int8": 0.05, "int4": 3.0}  # int4 breaks the quality floor
TTFT_S = {"fp32": 0.08, "bf16": 0.03, "int8": 0.005, "int4": 0.001}


def script_of(configuration: Configuration) -> FakeScript:
    """Lighter weights answer sooner; the slots are the engine's."""
    quantization = str(configuration["quantization"])
    return FakeScript(
        ttft_s=TTFT_S[quantization],
        tpot_s=0.001,
        num_slots=int(configuration["max_num_seqs"]),
        drift=DRIFT[quantization],
    )


class FakeHost:
    """``why_not`` returns the exit code with which a configuration fails to start, or ``None``."""

    def __init__(
        self,
        script: Callable[[Configuration], FakeScript] = script_of,
        why_not: Callable[[Configuration], int | None] = lambda _: None,
    ) -> None:
        self._script, self._why_not = script, why_not
        self.starts: list[Configuration] = []
        self.running: dict[str, FakeEngine] = {}
        self.exit_codes: dict[str, int] = {}

    async def start(self, configuration: Configuration, *, label: str) -> HostedEngine:
        self.starts.append(configuration)
        code = self._why_not(configuration)
        if code is not None:
            raise EngineStartError(f"{label} ended with exit code {code}", exit_code=code)
        engine = FakeEngine(self._script(configuration), configuration)
        name = str(len(self.starts))
        self.running[name] = engine
        return HostedEngine(await engine.start(), configuration, name, ())

    async def stop(self, engine: HostedEngine) -> None:
        if engine.id in self.running:
            await self.running[engine.id].stop()
            self.running.pop(engine.id, None)

    def exit_code(self, engine: HostedEngine) -> int | None:
        return self.exit_codes.get(engine.id)
