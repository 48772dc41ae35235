"""The one error tree. Every error that Trimtab raises on purpose is a ``TrimtabError``.

A message says what was found, where, and what to do; an unknown name lists the choices.

    TrimtabError
    ├── ManifestError          a policy or target manifest is wrong (file, line, found, accepted)
    ├── KnobError              a knob or its value is not one the engine takes
    ├── ModelError             a model cannot be used
    │   ├── ModelFetchError    it cannot be fetched (network, checksum)
    │   └── ModelFileError     its file is truncated, corrupt or of an unknown kind
    ├── RequestError           a request to the engine is wrong (an OpenAI-shaped 4xx)
    │   └── OverloadedError    the engine's queue is full or it drains (429 or 503, Retry-After)
    ├── EngineError            an engine process failed
    │   ├── EngineStartError   it did not become ready
    │   └── EngineCallError    a call to a running engine failed
    ├── KernelBuildError       the native kernels cannot be compiled
    ├── WorkloadError          a workload cannot be read or generated
    ├── ExperimentError        an experiment cannot start or go on
    ├── MetricsError           a metrics source could not answer
    ├── TrafficError           the proxy refused or lost a routing change
    ├── RolloutError           a rollout command is not possible in this state
    ├── StoreError             the state store refused or is damaged
    └── ControllerError        the controller is not running, or is already

    Errors that never leave the engine process (``UsageError``, ``StartError``, ``ClientGoneError``) stand where they are
    raised, below the same root.
"""


class TrimtabError(Exception):
    """The root of all errors that Trimtab raises on purpose."""


class ManifestError(TrimtabError):
    """A policy or target manifest is wrong; the message has file, line, what was found and what is accepted."""


class KnobError(TrimtabError):
    """A knob is unknown, or its value is not one that the engine takes."""


class ModelError(TrimtabError):
    """A model cannot be used."""


class ModelFetchError(ModelError):
    """A model cannot be fetched: no network, or the checksum differs."""


class ModelFileError(ModelError):
    """A model file is truncated, corrupt or of an unknown kind."""


class RequestError(TrimtabError):
    """A request to the engine is wrong. ``param`` names the offending field, ``None`` the whole body."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class OverloadedError(RequestError):
    """The engine cannot take the request now; ``retry_after_s`` says when to try again."""

    def __init__(self, message: str, *, retry_after_s: int, draining: bool = False) -> None:
        super().__init__(message, code="draining" if draining else "queue_full")
        self.retry_after_s = retry_after_s
        self.draining = draining


class EngineError(TrimtabError):
    """An engine process failed."""


class EngineStartError(EngineError):
    """An engine process did not become ready. ``exit_code`` is ``None`` while it is alive, or when unknown."""

    def __init__(self, message: str, *, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class EngineCallError(EngineError):
    """A call to a running engine failed."""


class KernelBuildError(TrimtabError):
    """The native kernels cannot be compiled."""


class WorkloadError(TrimtabError):
    """A workload cannot be read or generated."""


class ExperimentError(TrimtabError):
    """An experiment cannot start or go on."""


class MetricsError(TrimtabError):
    """A metrics source could not answer."""


class TrafficError(TrimtabError):
    """The proxy refused or lost a routing change."""


class RolloutError(TrimtabError):
    """A rollout command is not possible in this state."""


class StoreError(TrimtabError):
    """The state store refused a write or is damaged."""


class ControllerError(TrimtabError):
    """The controller is not running, or one is running already."""
