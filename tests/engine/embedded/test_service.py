"""The HTTP applications over a real core, in this process: what they say when the engine is ill or starved."""

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from trimtab.engine.embedded import serve
from trimtab.engine.embedded.engine_thread import MAX_FAILED_STEPS_IN_ROW, EngineThread
from trimtab.engine.embedded.inject import Injection
from trimtab.engine.embedded.loader import LoadedModel
from trimtab.engine.embedded.server import traffic_app
from trimtab.engine.embedded.service import Gate, ServedModel, Service
from trimtab.engine.embedded.settings import read_settings

BODY = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True}


@dataclass
class App:
    http: httpx.AsyncClient
    service: Service
    core: Any


@pytest.fixture
async def app(tiny_driver: Any, tiny_loaded: LoadedModel) -> AsyncIterator[App]:
    driver = tiny_driver()
    thread = EngineThread(driver.core)
    model = ServedModel("tiny", "digest", 512, tiny_loaded.tokenizer, int(time.time()))
    service = Service(thread, model, driver.telemetry, Gate(), max_queue=4, injection=Injection("label", 1.0))
    thread.start()
    transport = httpx.ASGITransport(traffic_app(service, None))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
        yield App(http, service, driver.core)
    thread.stop()


async def test_a_failing_engine_answers_500_and_turns_unhealthy(app: App) -> None:
    app.core._runner.run = lambda *_: 1 / 0
    for _ in range(MAX_FAILED_STEPS_IN_ROW):
        assert (await app.http.get("/health")).status_code == 200
        answer = await app.http.post("/v1/completions", json=BODY)
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "engine_error"
    app.service.engine.change(app.core.configuration).result(timeout=20)
    for path in ("/health", "/ready"):
        answer = await app.http.get(path)
        assert (answer.status_code, "ZeroDivisionError" in answer.text) == (503, True)
    assert app.core.scheduler.blocks.owned_units == 0


async def test_a_stream_that_fails_ends_with_an_error_event(app: App) -> None:
    run, calls = app.core._runner.run, []

    def fail_third(*step: Any) -> Any:
        calls.append(step)
        return run(*step) if len(calls) < 3 else 1 / 0

    app.core._runner.run = fail_third
    answer = await app.http.post("/v1/completions", json=BODY | {"stream": True})
    events = [json.loads(x[6:]) for x in answer.text.splitlines() if x.startswith("data: {")]
    assert [("choices" in e, "error" in e) for e in events] == [(True, False), (True, False), (False, True)]
    assert app.service.gate.num_in_flight == 0


async def test_more_prompts_than_the_queue_holds_are_refused_together(app: App) -> None:
    answer = await app.http.post("/v1/completions", json=BODY | {"prompt": [[5]] * 5})
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")
    assert (await app.http.post("/v1/completions", json=BODY | {"prompt": [[5]] * 4})).status_code == 200


def test_a_pool_larger_than_memory_is_refused_before_it_is_allocated(
    tiny_loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["serve", "--model", "m", "--port", "8000", "--admin-port", "8001"]
    settings = read_settings(argv, {"TRIMTAB_ENGINE_ADMIN_TOKEN": "t"})
    monkeypatch.setattr(serve, "available_bytes", lambda: 1000)
    with pytest.raises(serve.StartError, match="1000 bytes of memory") as refused:
        serve._warm_core(settings, tiny_loaded)
    assert refused.value.code is serve.ExitCode.MEMORY


def test_the_exit_codes_are_documented() -> None:
    text = (Path(serve.__file__).parent / "__main__.py").read_text()
    assert all(f"{code.value} " in text for code in serve.ExitCode)


def test_a_first_step_that_fails_is_the_engines_exit_code(
    tiny_loaded: LoadedModel, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_order(*_: Any) -> Any:
        raise RuntimeError("could not create a primitive")

    arguments = ["serve", "--model", str(tiny_model_dir), "--port", "1", "--admin-port", "2"]
    settings = read_settings(arguments, {"TRIMTAB_ENGINE_ADMIN_TOKEN": "token"})
    monkeypatch.setattr(tiny_loaded.model.__class__, "forward", out_of_order)
    with pytest.raises(serve.StartError, match="first step failed: could not create") as refused:
        serve._warm_core(settings, tiny_loaded)
    assert refused.value.code is serve.ExitCode.ENGINE
