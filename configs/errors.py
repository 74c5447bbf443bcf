"""Every error headrace raises on purpose, in one tree.

    HeadraceError
    ├── InvalidRequestError (ValueError)     one request is wrong: HTTP 400; names the parameter
    │   └── UnsupportedFeatureError          the request or option is known, but not built yet
    ├── ConfigurationError (ValueError)      engine arguments that cannot work; exit code 2
    ├── ModelFileError                       a model file is missing, truncated, or corrupt
    ├── InsufficientMemoryError              the numbers do not fit; says which flag value would
    ├── RequestFailedError                   one request failed while running: HTTP 500
    │   ├── NonFiniteLogitsError             the model produced NaN or Inf for it
    │   ├── EngineCrashError                 it made the engine core crash, twice
    │   ├── CallLostError                    the engine core was lost while a call ran
    │   ├── WrongStateError                  a call does not fit what the engine is doing
    │   └── RequestAbortedError              it was aborted before its end
    ├── EngineNotReadyError                  still loading or draining: HTTP 503, retry later
    │   └── EngineChangedError               the engine that came back is another one
    └── EngineDeadError (RuntimeError)       the engine core is gone: HTTP 503, retry elsewhere

Messages carry numbers and the fix. `code` is a stable string for each case, used on the wire and in
logs.
"""

from typing import ClassVar


class HeadraceError(Exception):
    """Base of all errors raised on purpose; `str(error)` is a complete sentence for the user."""

    code: ClassVar[str] = "headrace_error"


class InvalidRequestError(HeadraceError, ValueError):
    """A request refused at admission. `parameter` is the field at fault, or None."""

    code = "invalid_request"

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class UnsupportedFeatureError(InvalidRequestError):
    """A known option or field that this version does not implement; named in the message."""

    code = "unsupported_feature"


class ConfigurationError(HeadraceError, ValueError):
    """Engine arguments or environment variables that cannot work."""

    code = "configuration"


class ModelFileError(HeadraceError):
    """A model file or directory that cannot be used, with the path and what to do."""

    code = "model_file"


class InsufficientMemoryError(HeadraceError):
    """Too little memory, with the shortfall and the flag value that would start."""

    code = "insufficient_memory"


class RequestFailedError(HeadraceError):
    """A request that failed while running; others are not affected."""

    code = "request_failed"


class NonFiniteLogitsError(RequestFailedError):
    """The model produced NaN or infinite logits for this request."""

    code = "non_finite_logits"


class EngineCrashError(RequestFailedError):
    """Whenever this request runs, the engine core crashes; it is not run again."""

    code = "engine_crash"


class CallLostError(RequestFailedError):
    """The engine core was lost while a call ran in it; calls are not repeated."""

    code = "call_lost"


class WrongStateError(RequestFailedError):
    """A call that does not fit what the engine is doing: an update that nobody has begun, say."""

    code = "wrong_state"


class RequestAbortedError(RequestFailedError):
    """The request was aborted before it finished."""

    code = "aborted"


class EngineNotReadyError(HeadraceError):
    """The engine is starting or shutting down; the request may be retried."""

    code = "not_ready"


class EngineChangedError(EngineNotReadyError):
    """The engine was lost, and what came back would go on with another text. Retry from scratch."""

    code = "engine_changed"


class EngineDeadError(HeadraceError, RuntimeError):
    """The engine core process is gone; the request may be retried elsewhere."""

    code = "engine_dead"


def error_from_code(code: str, message: str) -> HeadraceError:
    """Rebuild the error that `code` names, for errors that travelled in a message."""
    for cls in _all_errors(HeadraceError):
        if cls.code == code:
            return cls(message)
    return RequestFailedError(message)


def _all_errors(cls: type[HeadraceError]) -> list[type[HeadraceError]]:
    return [cls] + [leaf for sub in cls.__subclasses__() for leaf in _all_errors(sub)]
