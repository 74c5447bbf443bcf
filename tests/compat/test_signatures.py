"""Names, order and defaults of the parameters of every public method of the engines."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from headrace import LLM, AsyncLLMEngine, LLMEngine, SamplingParams
from headrace.configs.engine_args import UsageContext

LATER = "*arguments, **options"  # refused whatever the arguments are
CONTEXT = "usage_context=ENGINE_CONTEXT, stat_loggers=None"
GENERATE = (
    "prompts=None, sampling_params=None, prompt_token_ids=None, use_tqdm=True, lora_request=None, "
    "prompt_adapter_request=None, guided_options_request=None, priority=None"
)
CHAT = (
    "messages, sampling_params=None, use_tqdm=True, lora_request=None, chat_template=None, "
    "chat_template_content_format='auto', add_generation_prompt=True, "
    "continue_final_message=False, tools=None, chat_template_kwargs=None, mm_processor_kwargs=None"
)
REMOTE = "method, timeout=None, args=(), kwargs=None"
REQUEST = "lora_request=None, trace_headers=None, prompt_adapter_request=None, priority=0"

LLM_METHODS = {
    "deprecate_legacy_api": "",
    "get_tokenizer": "lora_request=None",
    "set_tokenizer": "tokenizer",
    "get_default_sampling_params": "",
    "generate": GENERATE,
    "chat": CHAT,
    "beam_search": "prompts, params, lora_request=None, use_tqdm=False",
    "encode": LATER,
    "embed": LATER,
    "classify": LATER,
    "score": LATER,
    "collective_rpc": REMOTE,
    "apply_model": "func",
    "start_profile": "",
    "stop_profile": "",
    "reset_prefix_cache": "device=None",
    "sleep": "level=1",
    "wake_up": "tags=None",
    "get_metrics": "",
}
ENGINE_METHODS = {
    "from_engine_args": f"engine_args, {CONTEXT}",
    "from_vllm_config": f"vllm_config, {CONTEXT}, disable_log_stats=False",
    "get_tokenizer_group": "",
    "get_tokenizer": "lora_request=None",
    "enable_output_validation": "",
    "validate_output": "output, output_type",
    "validate_outputs": "outputs, output_type",
    "add_request": (
        "request_id, prompt, params, arrival_time=None, lora_request=None, "
        "tokenization_kwargs=None, trace_headers=None, prompt_adapter_request=None, priority=0"
    ),
    "abort_request": "request_id",
    "step": "",
    "get_num_unfinished_requests": "",
    "has_unfinished_requests": "",
    "has_unfinished_requests_for_virtual_engine": "virtual_engine",
    "stop_remote_worker_execution_loop": "",
    "get_vllm_config": "",
    "get_model_config": "",
    "get_parallel_config": "",
    "get_decoding_config": "",
    "get_scheduler_config": "",
    "get_lora_config": "",
    "reset_mm_cache": "",
    "reset_prefix_cache": "device=None",
    "add_logger": "logger_name, logger",
    "remove_logger": "logger_name",
    "do_log_stats": "scheduler_outputs=None, model_output=None, finished_before=None, skip=None",
    "add_lora": "lora_request",
    "remove_lora": "lora_id",
    "pin_lora": "lora_id",
    "list_loras": "",
    "add_prompt_adapter": "prompt_adapter_request",
    "remove_prompt_adapter": "prompt_adapter_id",
    "list_prompt_adapters": "",
    "start_profile": "",
    "stop_profile": "",
    "check_health": "",
    "is_tracing_enabled": "",
    "do_tracing": "*arguments",
    "create_trace_span": "seq_group",
    "collective_rpc": REMOTE,
    "sleep": "level=1",
    "wake_up": "tags=None",
    "is_sleeping": "",
}
ASYNC_METHODS = {
    "from_engine_args": f"engine_args, start_engine_loop=True, {CONTEXT}",
    "from_vllm_config": (
        f"vllm_config, start_engine_loop=True, {CONTEXT}, disable_log_requests=False, "
        "disable_log_stats=False"
    ),
    "start_background_loop": "",
    "shutdown_background_loop": "",
    "add_request": (
        f"request_id, prompt, params, arrival_time=None, {REQUEST}, data_parallel_rank=None"
    ),
    "generate": f"prompt, sampling_params, request_id, {REQUEST}, data_parallel_rank=None",
    "encode": LATER,
    "abort": "request_id",
    "get_input_preprocessor": "",
    "get_tokenizer": "lora_request=None",
    "get_vllm_config": "",
    "get_model_config": "",
    "get_parallel_config": "",
    "get_decoding_config": "",
    "get_scheduler_config": "",
    "get_lora_config": "",
    "do_log_stats": "scheduler_outputs=None, model_output=None",
    "check_health": "",
    "is_tracing_enabled": "",
    "is_sleeping": "",
    "start_profile": "",
    "stop_profile": "",
    "reset_mm_cache": "",
    "reset_prefix_cache": "device=None",
    "sleep": "level=1",
    "wake_up": "tags=None",
    "add_lora": "lora_request",
    "collective_rpc": REMOTE,
    "add_logger": "logger_name, logger",
    "remove_logger": "logger_name",
    "set_errored": "exc",
}
COROUTINES = {
    "add_request", "abort", "get_input_preprocessor", "get_tokenizer", "get_vllm_config",
    "get_model_config", "get_parallel_config", "get_decoding_config", "get_scheduler_config",
    "get_lora_config", "do_log_stats", "check_health", "is_tracing_enabled", "is_sleeping",
    "start_profile", "stop_profile", "reset_mm_cache", "reset_prefix_cache", "sleep", "wake_up",
    "add_lora", "collective_rpc", "encode",
}  # fmt: skip
METHODS = [
    *((LLM, name, parameters) for name, parameters in LLM_METHODS.items()),
    *((LLMEngine, name, parameters) for name, parameters in ENGINE_METHODS.items()),
    *((AsyncLLMEngine, name, parameters) for name, parameters in ASYNC_METHODS.items()),
]


def parameters_of(method: Callable[..., Any]) -> str:
    shown = []
    for name, parameter in inspect.signature(method).parameters.items():
        if name == "self":
            continue
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        text = stars.get(parameter.kind, "") + name
        if isinstance(parameter.default, UsageContext):
            text += f"={parameter.default.name}"
        elif parameter.default is not parameter.empty:
            text += f"={parameter.default!r}"
        shown.append(text)
    return ", ".join(shown)


@pytest.mark.parametrize(
    ("owner", "name", "parameters"), METHODS, ids=[f"{c.__name__}.{n}" for c, n, _ in METHODS]
)
def test_parameters(owner: type, name: str, parameters: str) -> None:
    assert parameters_of(getattr(owner, name)) == parameters


def test_constructors() -> None:
    """The model may stand first, everything else has a name; engines take what vLLM's take."""
    llm = inspect.signature(LLM).parameters
    assert list(llm) == ["model", "engine_args"]
    assert llm["engine_args"].kind is inspect.Parameter.VAR_KEYWORD
    first = "vllm_config, executor_class=None, log_stats=True"
    assert parameters_of(LLMEngine).startswith(
        f"{first}, {CONTEXT}, mm_registry=None, use_cached_outputs=False"
    )
    assert parameters_of(AsyncLLMEngine).startswith(
        f"{first}, {CONTEXT}, log_requests=True, start_engine_loop=True"
    )


def test_what_is_awaited() -> None:
    found = {name for name in ASYNC_METHODS if inspect.iscoroutinefunction(
        inspect.getattr_static(AsyncLLMEngine, name))}  # fmt: skip
    assert found == COROUTINES
    assert inspect.isasyncgenfunction(AsyncLLMEngine.generate)


def test_class_attributes() -> None:
    assert LLM.DEPRECATE_LEGACY is True and LLMEngine.DO_VALIDATE_OUTPUT is False
    for name in ("is_running", "is_stopped", "errored", "dead_error"):
        assert isinstance(inspect.getattr_static(AsyncLLMEngine, name), property)


def test_from_optional_is_static() -> None:
    assert isinstance(inspect.getattr_static(SamplingParams, "from_optional"), staticmethod)
