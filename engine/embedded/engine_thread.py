"""The thread in which the core runs, and the inbox through which the HTTP side reaches it.

The HTTP side calls ``submit``, ``cancel`` and ``change`` from its event loop; each becomes a command that the thread
carries out between two steps. Output comes back through each request's ``deliver``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue

import structlog
import torch

from trimtab.engine.contract import Configuration
from trimtab.engine.embedded.core import EngineCore
from trimtab.engine.embedded.generation import Emission, GenerationRequest
from trimtab.errors import KnobError, RequestError

# A fault that fails this many steps in a row is hardly the requests': the engine says so, and still tries.
MAX_FAILED_STEPS_IN_ROW = 8

_log = structlog.get_logger(__name__)


class EngineThread:
    """Drives one core until ``stop``. A step that raises fails its requests, and the thread goes on."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="trimtab-engine", daemon=True)
        self._num_submitting = 0
        self._count_lock = threading.Lock()
        self._stopping = False
        self._fatal: str | None = None

    @property
    def fatal(self) -> str | None:
        """Why the engine cannot serve; ``None`` while it can. A step that works again clears it."""
        if (
            self._fatal is None
            and self._thread.ident is not None
            and not self._thread.is_alive()
            and not self._stopping
        ):
            return "the engine thread has ended"
        return self._fatal

    @property
    def num_waiting(self) -> int:
        """Requests that are not admitted yet, those still in the inbox included."""
        return self._num_submitting + self._core.scheduler.num_waiting

    @property
    def configuration(self) -> Configuration:
        return self._core.configuration

    @property
    def capacity_tokens(self) -> int:
        return self._core.capacity_tokens

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the thread after the step it is in. What is still in flight is failed."""
        self._stopping = True
        self._inbox.put(lambda: None)
        self._thread.join(timeout_s)

    def submit(self, request: GenerationRequest) -> None:
        """Hands a request over. Whatever becomes of it arrives at ``request.deliver``."""
        with self._count_lock:
            self._num_submitting += 1
        self._inbox.put(lambda: self._submit(request))

    def cancel(self, request: GenerationRequest) -> None:
        self._inbox.put(lambda: self._core.cancel(request))

    def change(self, configuration: Configuration) -> Future[Configuration]:
        """Asks for live knobs; the future is done when they are in force, or has the ``KnobError``.

        A future that is cancelled before the step boundary changes nothing.
        """
        answer: Future[Configuration] = Future()
        self._inbox.put(lambda: self._change(configuration, answer))
        return answer

    def _submit(self, request: GenerationRequest) -> None:
        # Counted twice for a moment, it would turn away a request for which there is room.
        with self._count_lock:
            self._num_submitting -= 1
        try:
            self._core.submit(request)
        except RequestError as error:
            request.deliver(Emission.failed(error))

    def _change(self, configuration: Configuration, answer: Future[Configuration]) -> None:
        if not answer.set_running_or_notify_cancel():
            return
        try:
            self._core.change(configuration)
        except KnobError as error:
            answer.set_exception(error)
        else:
            _log.info("knobs_changed", configuration=configuration.id)
            answer.set_result(configuration)

    def _main(self) -> None:
        try:
            # torch keeps the number of threads for each calling thread.
            torch.set_num_threads(int(self._core.configuration["num_threads"]))
            self._loop()
        except BaseException as error:  # noqa: BLE001  the thread's edge: nobody else could report it
            self._fatal = f"{type(error).__name__}: {error}"
            _log.critical("engine_thread_failed", error=self._fatal, exc_info=True)
        message = "the engine stopped" if self._fatal is None else f"the engine failed: {self._fatal}"
        self._core.fail_all(message)
        self._refuse_rest(message)

    def _loop(self) -> None:
        num_failed = 0
        while not self._stopping:
            self._take_commands()
            if not self._core.has_work:
                continue
            try:
                self._core.step()
                num_failed, self._fatal = 0, None
            except Exception as error:  # noqa: BLE001  the step's edge: its requests fail, the others go on
                num_failed += 1
                _log.error("step_failed", error=f"{type(error).__name__}: {error}", exc_info=True)
                self._core.fail_step(f"the engine failed in this request's step: {type(error).__name__}")
                if num_failed >= MAX_FAILED_STEPS_IN_ROW:
                    self._fatal = f"{num_failed} steps in a row failed: {type(error).__name__}: {error}"

    def _take_commands(self) -> None:
        """Carries out all commands; waits for one when there is nothing else to do."""
        if not self._core.has_work:
            self._inbox.get()()
        while True:
            try:
                command = self._inbox.get_nowait()
            except Empty:
                return
            command()

    def _refuse_rest(self, message: str) -> None:
        """Answers what comes after the end, for as long as the process serves its error."""
        while not self._stopping:
            command = self._inbox.get()
            command()
            self._core.fail_all(message)
