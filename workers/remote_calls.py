"""What `collective_rpc` can call on every worker, beside the steps: the model, the profiler."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from headrace.configs.config import EngineConfig
from headrace.configs.errors import ConfigurationError, InvalidRequestError
from headrace.workers.kv_cache import KVCache
from headrace.workers.models import Decoder
from headrace.workers.models.native_decoder import NativeDecoder, op_name
from headrace.workers.models.op_profile import OpProfile


class RemoteCalls:
    """Mixed into the worker. All calls come between two steps, on the thread that runs them."""

    config: EngineConfig
    _kv_cache: KVCache | None
    _model: Decoder | None
    _profiler: Any = None

    def get_model(self) -> Decoder:
        """The model, with its weights."""
        if self._model is None:
            raise RuntimeError("load_model makes the model")
        return self._model

    def apply_model(self, func: Callable[[Any], Any]) -> Any:
        """`func(model)`, without recording gradients."""
        with torch.inference_mode():
            return func(self.get_model())

    def wait_for_cache(self, timeout_s: float) -> bool:
        """Wait until the KV cache's memory has its pages; whether it has. For benchmarks.

        Until then a step that comes to new pages waits for the system to find them.
        """
        if self._kv_cache is None:
            raise RuntimeError("load_model makes the KV cache")
        return self._kv_cache.toucher.wait(timeout_s)

    def start_profile(self) -> None:
        """Begin to record with torch's profiler."""
        _profile_directory(self.config)
        if self._profiler is not None:
            raise InvalidRequestError("the profiler runs already; call stop_profile first")
        profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
        )
        profiler.start()
        self._profiler = profiler

    def stop_profile(self) -> str:
        """Stop recording and write a Chrome trace; returns its path."""
        directory = _profile_directory(self.config)
        if self._profiler is None:
            raise InvalidRequestError("the profiler does not run; call start_profile first")
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"headrace-{os.getpid()}-{time.time_ns()}.pt.trace.json"
        profiler.export_chrome_trace(str(path))
        return str(path)

    def start_op_profile(self) -> bool:
        """Begin to time each operation of the steps; False if the kernels are torch's."""
        model = self.get_model()
        if not isinstance(model, NativeDecoder):
            return False
        model.op_profile = OpProfile(op_name)
        return True

    def stop_op_profile(self) -> dict[str, Any]:
        """Stop that; what `OpProfile.totals` gives. InvalidRequestError if it was not begun."""
        model = self.get_model()
        if not isinstance(model, NativeDecoder) or model.op_profile is None:
            raise InvalidRequestError("operations are not timed; call start_op_profile first")
        profile, model.op_profile = model.op_profile, None
        return profile.totals()


def _profile_directory(config: EngineConfig) -> Path:
    if config.profiler_config is None:
        raise ConfigurationError(
            "profiling needs a directory for its traces: start the engine with "
            '--profiler-config \'{"torch_profiler_dir": "DIR"}\' (in Python, '
            "profiler_config={'torch_profiler_dir': 'DIR'})"
        )
    return Path(config.profiler_config.torch_profiler_dir)
