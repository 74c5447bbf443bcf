"""One worker in the calling process: no extra hop."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.configs.config import EngineConfig
from headrace.configs.errors import ConfigurationError, InvalidRequestError
from headrace.workers.protocol import ModelRunnerOutput, SchedulerOutput, WorkerInfo

DEFAULT_WORKER = "headrace.workers.worker:Worker"


def preload(worker_class: str = DEFAULT_WORKER) -> None:
    """Import what workers need (torch takes seconds) while the configuration is on its way."""
    importlib.import_module(worker_class.partition(":")[0])


class UniprocExecutor:
    """Runs `worker_class` ("module:Class") in this process; the import of it loads torch."""

    def __init__(self, config: EngineConfig, worker_class: str = DEFAULT_WORKER) -> None:
        module, _, name = worker_class.partition(":")
        cls: type[Any] = getattr(importlib.import_module(module), name)
        extension = config.parallel_config.worker_extension_cls
        if extension:
            cls = _extended(cls, extension)
        self._worker: Any = cls(config)

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

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> list[Any]:
        """Call a method of every worker, or a callable with the worker as its first argument.

        One result, or the exception that was raised in its place, per worker. Raises
        InvalidRequestError for a name that is no public method of the worker.
        """
        if isinstance(method, str):
            call = None if method.startswith("_") else getattr(self._worker, method, None)
            if not callable(call):
                raise InvalidRequestError(f"the worker has no method {method!r}", "method")
        else:
            call = _bound(method, self._worker)
        try:
            return [call(*args, **kwargs)]
        except Exception as error:
            return [RaisedByWorker(error)]
        except SystemExit as error:  # a script's helper that calls sys.exit() ends the call, not us
            return [RaisedByWorker(RuntimeError(f"the call ended with SystemExit({error.code!r})"))]

    def shutdown(self) -> None:
        """Stop what the worker runs in the background."""
        self._worker.shutdown()


class RaisedByWorker:
    """Stands in a list of results where a worker raised an exception."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _bound(function: Callable[..., Any], worker: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(worker, *args, **kwargs)


def _extended(cls: type[Any], extension: str) -> type[Any]:
    """`cls` with the methods of `extension` ("module.Class") mixed in; none may replace another."""
    module, _, name = extension.rpartition(".")
    try:
        mixin: type[Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"worker_extension_cls {extension!r} cannot be imported: {error}"
        ) from error
    taken = [
        attribute for attribute in vars(mixin) if attribute[:2] != "__" and hasattr(cls, attribute)
    ]
    if taken:
        raise ConfigurationError(
            f"worker_extension_cls {extension!r} has {', '.join(sorted(taken))}, which the worker "
            "has already; rename them"
        )
    return type(cls.__name__, (cls, mixin), {})
