"""Options of the model: which one, its tokenizer, its type, its sampling defaults."""

# ruff: noqa: RUF009 (every default here is made by option(), a dataclass field)

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from headrace.configs.options import option, parse_json_object, parse_size

DEFAULT_MODEL = "smollm2-135m"
DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
RUNNERS = ("auto", "generate", "pooling", "draft")
CONVERTS = ("auto", "none", "embed", "classify")
TASKS = (
    "auto", "generate", "embedding", "embed", "classify", "score", "reward", "transcription",
    "draft",
)  # fmt: skip
LOGPROBS_MODES = {
    "raw": "raw_logprobs",
    "processed": "processed_logprobs",
    "raw_logprobs": "raw_logprobs",
    "raw_logits": "raw_logits",
    "processed_logprobs": "processed_logprobs",
    "processed_logits": "processed_logits",
}

_option = partial(option, group="ModelConfig")
_later = partial(_option, status="later")
_legacy = partial(_option, status="legacy")


def _max_model_len(text: str) -> int | str:
    return text if text in ("auto", "-1") else parse_size(text)


@dataclasses.dataclass
class ModelOptions:
    """Which model runs, and how it is read."""

    model: str = _option(
        DEFAULT_MODEL, "a directory or .gguf file, an alias, or a hub id (org/name)"
    )
    task: str = _later("auto", "what the model is used for", choices=TASKS, holds=["generate"])
    tokenizer: str | None = _option(
        None, "directory, tokenizer.json or .gguf file with the tokenizer (default: the model)"
    )
    tokenizer_mode: str = _later(
        "auto", "which tokenizer implementation",
        choices=["auto", "hf", "slow", "mistral", "custom"], holds=["hf"],
    )  # fmt: skip
    trust_remote_code: bool = _later(False, "run code that comes with the checkpoint")
    dtype: str = _option(
        "auto", "type of activations, and of weights that are not quantized; auto: bfloat16 where "
        "the CPU computes with it",
        choices=DTYPES,
    )  # fmt: skip
    seed: int | None = _option(
        None, "derive the seeds of requests that give none (default: fresh entropy)"
    )
    hf_config_path: str | None = _option(
        None, "directory of a config.json to use instead of the model's"
    )
    allowed_local_media_path: str = _later("", "folder whose media files requests may name")
    revision: str | None = _option(None, "branch, tag or commit of a hub id")
    code_revision: str | None = _later(None, "revision of code that comes with the checkpoint")
    tokenizer_revision: str | None = _later(
        None, "revision of the tokenizer, where it is not the model's"
    )
    rope_scaling: dict[str, Any] = _legacy({}, "use --hf-overrides.rope_scaling instead")
    rope_theta: float | None = _legacy(None, "use --hf-overrides.rope_theta instead")
    max_model_len: int | str | None = _option(
        None, "longest prompt plus output, in tokens (default: the model's)", parse=_max_model_len
    )
    quantization: str | None = _option(
        None, "how weights are kept. gguf: in the blocks of the GGUF file, the default for one "
        "unless --dtype is given. none: in --dtype, dequantized if need be. "
        "int8_per_channel_weight_only, or int8: any model's linear layers and output head (with "
        "the embedding, where they share a weight) are rounded to 8 bits at loading, with a scale "
        "per row", flags=["-q"], parse=str.lower,
    )  # fmt: skip
    enforce_eager: bool = _later(
        False, "no captured graphs and no compilation; always so on CPUs", holds=[True]
    )
    max_seq_len_to_capture: int = _legacy(8192, "graphs are not captured")
    max_logprobs: int = _option(
        20, "most log-probabilities a request may ask for; -1: no limit", minimum=-1
    )
    logprobs_mode: str = _option(
        "raw_logprobs", "whether logprobs are those of the model (raw) or those sampled from "
        "(processed), as log-probabilities or as logits", choices=list(LOGPROBS_MODES),
    )  # fmt: skip
    disable_sliding_window: bool = _later(
        False, "limit the length to the sliding window instead of sliding"
    )
    disable_cascade_attn: bool = _legacy(False, "there is no cascade attention")
    skip_tokenizer_init: bool = _option(
        False, "no tokenizer: prompts are token ids, and so are outputs"
    )
    enable_prompt_embeds: bool = _later(False, "accept embeddings as prompts")
    served_model_name: str | list[str] | None = _option(
        None, "name(s) in the API; the first is reported (default: the model)"
    )
    disable_async_output_proc: bool = _legacy(
        False, "outputs are always processed beside the next step", switch=True
    )
    config_format: str = _later(
        "auto", "format of the model's configuration", choices=["auto", "hf", "mistral"],
        holds=["hf"],
    )  # fmt: skip
    hf_token: bool | str | None = _option(
        None, "hub token; without a value: the saved login (default: that or HF_TOKEN, if any)",
        bare=True, secret=True,
    )  # fmt: skip
    hf_overrides: dict[str, Any] | Callable[[dict[str, Any]], dict[str, Any]] = _option(
        {}, "JSON object merged into the model's config.json; in Python also a function of it",
        parse=parse_json_object,
    )  # fmt: skip
    override_neuron_config: dict[str, Any] = _legacy({}, "Neuron devices are not supported")
    override_pooler_config: dict[str, Any] | None = _later(None, "how embeddings are pooled")
    logits_processor_pattern: str | None = _legacy(None, "requests cannot name logits processors")
    logits_processors: list[str] | None = _later(
        None, "logits processors of your own, as module:Class"
    )
    generation_config: str = _option(
        "auto", "sampling defaults: auto takes the model's, headrace none, and a folder those of "
        "the generation_config.json in it, whose max_new_tokens then limits every request",
    )  # fmt: skip
    override_generation_config: dict[str, Any] = _option(
        {}, 'JSON of sampling defaults, over those of the files, such as {"temperature": 0.5}; '
        "max_new_tokens limits every request",
    )  # fmt: skip
    enable_sleep_mode: bool = _option(
        False, "let the engine sleep: give back the memory of weights and KV cache, and wake up"
    )
    sleep_spill_dir: str | None = _option(
        None, "folder on a disk for the weights of a sleeping engine that no file has (default: "
        "the system's folder for temporary files)",
    )  # fmt: skip
    model_impl: str = _later(
        "auto", "whose model definitions to use",
        choices=["auto", "headrace", "vllm", "transformers", "terratorch"],
        holds=["headrace", "vllm"],
    )  # fmt: skip
    override_attention_dtype: str | None = _legacy(None, "attention computes in its own type")
    runner: str = _later("auto", "generate text or pool", choices=RUNNERS, holds=["generate"])
    convert: str = _later(
        "auto", "turn a generating model into an embedding one", choices=CONVERTS, holds=["none"]
    )
    renderer_num_workers: int = _option(1, "threads that render templates and tokenize", minimum=1)
    attention_backend: str | None = _later(
        None, "which attention kernels", flags=["-ac"], holds=["auto"]
    )
