"""headrace: LLM inference and serving with vLLM's API.

Public names are imported when first used, so that `import headrace` is cheap.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from headrace.engine.async_llm_engine import AsyncLLMEngine
    from headrace.engine.llm_engine import LLMEngine
    from headrace.entrypoints.llm import LLM
    from headrace.inputs import PromptType, TextPrompt, TokensPrompt
    from headrace.outputs import CompletionOutput, RequestOutput
    from headrace.sampling_params import SamplingParams

__version__ = "0.1.0"
__version_tuple__ = (0, 1, 0)

MODULE_ATTRS = {  # public name -> "module, relative to this package:attribute"
    "LLM": ".entrypoints.llm:LLM",
    "PromptType": ".inputs:PromptType",
    "TextPrompt": ".inputs:TextPrompt",
    "TokensPrompt": ".inputs:TokensPrompt",
    "SamplingParams": ".sampling_params:SamplingParams",
    "RequestOutput": ".outputs:RequestOutput",
    "CompletionOutput": ".outputs:CompletionOutput",
    "LLMEngine": ".engine.llm_engine:LLMEngine",
    "EngineArgs": ".engine.arg_utils:EngineArgs",
    "AsyncLLMEngine": ".engine.async_llm_engine:AsyncLLMEngine",
    "AsyncEngineArgs": ".engine.arg_utils:AsyncEngineArgs",
    "initialize_ray_cluster": ".executors.ray_cluster:initialize_ray_cluster",
}

# Names of vLLM's package whose features this version does not have.
NOT_HERE_YET = (
    "ModelRegistry", "PoolingOutput", "PoolingRequestOutput", "EmbeddingOutput",
    "EmbeddingRequestOutput", "ClassificationOutput", "ClassificationRequestOutput",
    "ScoringOutput", "ScoringRequestOutput", "PoolingParams",
)  # fmt: skip

__all__ = [
    "__version__",
    "__version_tuple__",
    "LLM",
    "PromptType",
    "TextPrompt",
    "TokensPrompt",
    "SamplingParams",
    "RequestOutput",
    "CompletionOutput",
    "LLMEngine",
    "EngineArgs",
    "AsyncLLMEngine",
    "AsyncEngineArgs",
    "initialize_ray_cluster",
]


def __getattr__(name: str) -> Any:
    target = MODULE_ATTRS.get(name)
    if target is None:
        reason = " (not in this version yet)" if name in NOT_HERE_YET else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{reason}")
    module, _, attribute = target.partition(":")
    value = getattr(importlib.import_module(module, __name__), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
