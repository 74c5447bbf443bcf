"""headrace: LLM inference and serving with vLLM's API.

Public names are imported when first used, so that `import headrace` is cheap.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.configs.engine_args import AsyncEngineArgs, EngineArgs
    from headrace.configs.sampling_params import SamplingParams
    from headrace.frontend.llm import LLM
    from headrace.frontend.outputs import CompletionOutput, RequestOutput

__version__ = "0.1.0"
__version_tuple__ = (0, 1, 0)

MODULE_ATTRS = {
    "LLM": "headrace.frontend.llm:LLM",
    "SamplingParams": "headrace.configs.sampling_params:SamplingParams",
    "RequestOutput": "headrace.frontend.outputs:RequestOutput",
    "CompletionOutput": "headrace.frontend.outputs:CompletionOutput",
    "EngineArgs": "headrace.configs.engine_args:EngineArgs",
    "AsyncEngineArgs": "headrace.configs.engine_args:AsyncEngineArgs",
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "CompletionOutput",
    "EngineArgs",
    "RequestOutput",
    "SamplingParams",
    "__version__",
    "__version_tuple__",
]


def __getattr__(name: str) -> Any:
    target = MODULE_ATTRS.get(name)
    if target is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = target.partition(":")
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value
