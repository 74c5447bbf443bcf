"""A worker and what every executor does with it, in whichever process it lives."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.configs.config import EngineConfig
from headrace.configs.errors import ConfigurationError, HeadraceError, InvalidRequestError
from headrace.executors.worker_calls import Method, decode_call, encode_error, encode_result
from headrace.workers.protocol import (
    ModelRunnerOutput,
    RequestFault,
    SchedulerOutput,
    WorkerCall,
    WorkerInfo,
    WorkerResult,
    WorkerSetup,
)

DEFAULT_WORKER = "headrace.workers.worker.Worker"


def preload(worker_cls: str = "") -> None:
    """Import what workers need (torch takes seconds) while the configuration is on its way.

    A class of the user's own may not be found before that has come: it is imported then.
    """
    if not worker_cls:
        importlib.import_module(DEFAULT_WORKER.rpartition(".")[0])


class WorkerHost:
    """Makes the worker that the configuration names; that imports torch."""

    def __init__(self, config: EngineConfig, setup: WorkerSetup, allows_callables: bool) -> None:
        """`allows_callables`: whether calls may carry cloudpickle."""
        parallel = config.parallel_config
        cls = _imported(parallel.worker_cls or DEFAULT_WORKER, "worker_cls")
        if parallel.worker_extension_cls:
            cls = _extended(cls, parallel.worker_extension_cls)
        self._worker: Any = cls(config, setup)
        self._rank = setup.rank
        self._allows_callables = allows_callables

    def start(self, progress: Callable[[str], None]) -> WorkerInfo:
        """Load the model and set up the KV cache; `progress` is told each phase as it begins."""
        progress("device")
        self._worker.init_device()
        progress("weights")
        self._worker.load_model(progress)
        progress("KV cache")
        info: WorkerInfo = self._worker.init_kv_cache()
        progress("warm-up")
        self._worker.warm_up()
        return info

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step.

        An exception here concerns the whole batch; single faults are in the output.
        """
        output: ModelRunnerOutput = self._worker.execute_model(step)
        return output

    def call(self, call: WorkerCall) -> WorkerResult:
        """Run a call between two steps; errors come back in the result."""
        try:
            method, args, kwargs = decode_call(call, self._allows_callables)
            bound = self._bound(method)
        except HeadraceError as error:
            return WorkerResult(fault=RequestFault(error.code, str(error)))
        except Exception as error:  # such a callable cannot be read here
            message = f"the call cannot be read: {type(error).__name__}: {error}"
            return WorkerResult(fault=RequestFault("invalid_request", message))
        try:
            value = bound(*args, **kwargs)
        except Exception as error:
            return encode_error(error, self._rank, self._allows_callables)
        except SystemExit as error:  # a script's helper that calls sys.exit() ends the call, not us
            ended = RuntimeError(f"the call ended with SystemExit({error.code!r})")
            return encode_error(ended, self._rank, self._allows_callables)
        return encode_result(value, self._allows_callables)

    def share(self, data: bytes, source: int) -> bytes:
        """What the worker of rank `source` gives, on all workers. All of them call it."""
        shared: bytes = self._worker.share(data, source)
        return shared

    def shutdown(self) -> None:
        """Stop what the worker runs in the background."""
        self._worker.shutdown()

    def _bound(self, method: Method) -> Callable[..., Any]:
        """A public method of the worker, or a callable whose first argument is the worker."""
        if not isinstance(method, str):
            return _with_first(method, self._worker)
        found = None if method.startswith("_") else getattr(self._worker, method, None)
        if not callable(found):
            raise InvalidRequestError(f"the worker has no method {method!r}", "method")
        bound: Callable[..., Any] = found
        return bound


def _with_first(function: Callable[..., Any], worker: Any) -> Callable[..., Any]:
    def call(*args: Sequence[Any], **kwargs: Mapping[str, Any]) -> Any:
        return function(worker, *args, **kwargs)

    return call


def _imported(name: str, option: str) -> type[Any]:
    module, _, attribute = name.rpartition(".")
    try:
        cls: type[Any] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"{option} {name!r} cannot be imported: {error}") from error
    return cls


def _extended(cls: type[Any], extension: str) -> type[Any]:
    """`cls` with the methods of `extension` ("module.Class") mixed in; none may replace another."""
    mixin = _imported(extension, "worker_extension_cls")
    taken = [
        attribute for attribute in vars(mixin) if attribute[:2] != "__" and hasattr(cls, attribute)
    ]
    if taken:
        raise ConfigurationError(
            f"worker_extension_cls {extension!r} has {', '.join(sorted(taken))}, which the worker "
            "has already; rename them"
        )
    return type(cls.__name__, (cls, mixin), {})
