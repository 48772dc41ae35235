"""The engine's thread: it never dies silently, and everything that is asked of it gets an answer."""

import queue
import threading
import time
from typing import Any

import pytest

from trimtab.engine.adapters.embedded import CATALOGUE
from trimtab.engine.embedded.engine_thread import MAX_FAILED_STEPS_IN_ROW, EngineThread
from trimtab.engine.embedded.generation import Emission, FinishReason, GenerationRequest
from trimtab.engine.embedded.sampling import SamplingParams
from trimtab.errors import KnobError

PARAMS = SamplingParams(max_output_tokens=4, temperature=0.0, ignore_eos=True)


def request(deliver: Any, params: SamplingParams = PARAMS) -> GenerationRequest:
    return GenerationRequest("r", (5, 6, 7), params, time.monotonic(), time.time(), deliver)


def last_of(emissions: "queue.Queue[Emission]") -> Emission:
    while True:
        emission = emissions.get(timeout=20)
        if emission.finish is not None:
            return emission


def test_output_comes_from_the_thread_and_stop_ends_it(tiny_driver: Any) -> None:
    thread = EngineThread(tiny_driver().core)
    thread.start()
    threads: list[str] = []
    emissions: queue.Queue[Emission] = queue.Queue()
    thread.submit(request(lambda e: (threads.append(threading.current_thread().name), emissions.put(e))))
    assert last_of(emissions).finish is FinishReason.LENGTH
    assert set(threads) == {"trimtab-engine"}
    assert thread.num_waiting == 0
    thread.stop()
    assert thread.fatal is None


def test_a_failing_step_fails_its_request_and_success_clears_the_alarm(tiny_driver: Any) -> None:
    core = tiny_driver().core
    thread, run = EngineThread(core), core._runner.run
    core._runner.run = lambda *_: 1 / 0
    thread.start()
    emissions: queue.Queue[Emission] = queue.Queue()
    for _ in range(MAX_FAILED_STEPS_IN_ROW):
        assert thread.fatal is None
        thread.submit(request(emissions.put))
        failed = last_of(emissions)
        assert failed.finish is FinishReason.ERROR
        assert "ZeroDivisionError" in str(failed.error)
    answered = thread.change(core.configuration)  # the alarm is set before the next command
    answered.result(timeout=20)
    assert "ZeroDivisionError" in (thread.fatal or "")
    core._runner.run = run
    thread.submit(request(emissions.put))
    assert last_of(emissions).finish is FinishReason.LENGTH
    thread.change(core.configuration).result(timeout=20)
    assert thread.fatal is None
    thread.stop()


def test_a_change_that_nobody_waits_for_any_more_is_not_made_and_does_no_harm(tiny_driver: Any) -> None:
    core = tiny_driver().core
    thread, before = EngineThread(core), core.configuration
    given_up = thread.change(CATALOGUE.configuration({"max_num_seqs": 2}, base=before))
    assert given_up.cancel()
    thread.start()
    assert thread.change(before).result(timeout=20) == before
    assert core.configuration == before
    assert thread.fatal is None
    thread.stop()


def test_when_the_loop_itself_breaks_it_says_so_and_answers_everyone(tiny_driver: Any) -> None:
    core = tiny_driver().core
    thread = EngineThread(core)
    core.fail_step = lambda message: {}["missing"]
    core._runner.run = lambda *_: 1 / 0
    thread.start()
    emissions: queue.Queue[Emission] = queue.Queue()
    thread.submit(request(emissions.put))
    assert last_of(emissions).finish is FinishReason.ERROR
    assert "KeyError" in (thread.fatal or "")
    thread.submit(request(emissions.put))
    assert "the engine failed" in str(last_of(emissions).error)
    thread.stop()


def test_what_never_fits_is_answered_with_an_error(tiny_driver: Any) -> None:
    thread = EngineThread(tiny_driver().core)
    thread.start()
    emissions: queue.Queue[Emission] = queue.Queue()
    thread.submit(request(emissions.put, SamplingParams(max_output_tokens=10**6)))
    assert "never fit" in str(last_of(emissions).error)
    assert thread.num_waiting == 0
    thread.stop()


def test_a_change_of_live_knobs_is_answered_when_in_force(tiny_driver: Any) -> None:
    core = tiny_driver().core
    thread = EngineThread(core)
    thread.start()
    wanted = CATALOGUE.configuration({"max_num_seqs": 7}, base=core.configuration)
    assert thread.change(wanted).result(timeout=20) == wanted
    assert core.scheduler.limits.max_num_seqs == 7
    with pytest.raises(KnobError):
        thread.change(CATALOGUE.configuration({"num_threads": 2}, base=wanted)).result(timeout=20)
    assert thread.configuration == wanted
    thread.stop()
