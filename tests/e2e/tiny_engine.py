"""A real scheduler on a real, tiny, random model: for the tests that compare whole outputs."""

from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from headrace.configs.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    QuantizationMethod,
    SchedulerConfig,
)
from headrace.configs.model_files.model_info import read_model_info
from headrace.configs.sampling_params import SamplingParams
from headrace.engine_core.messages import ChoiceState, EngineCoreOutput, EngineCoreRequest
from headrace.engine_core.scheduler import Scheduler
from headrace.workers.protocol import ModelRunnerOutput, SchedulerOutput
from headrace.workers.worker import Worker
from tests.workers.tiny_gguf import write_llama

BLOCK_SIZE = 4
VOCAB = 32
WINDOW = 10
MAX_MODEL_LEN = 64

# Sampling fields beside seed and temperature; a request has one of these.
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    {"logit_bias": {5: 4.0, 7: -100.0, 20: 1.5}, "allowed_token_ids": list(range(30))},
    {"prompt_logprobs": 2, "repetition_penalty": 0.7, "min_tokens": 2, "top_p": 0.9},
    {"bad_words": [[9], [10, 11], [5, 5], [12, 12, 13]], "frequency_penalty": -1.0, "top_k": 9},
)


def save_tiny_model(kind: str, directory: Path) -> Path:
    """A random model in transformers' format, small enough for thousands of steps."""
    import transformers

    common = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": MAX_MODEL_LEN,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "initializer_range": 0.5,
    }  # fmt: skip
    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(num_hidden_layers=2, **common)
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.Gemma3TextConfig(
            num_hidden_layers=2, sliding_window=WINDOW, query_pre_attn_scalar=8,
            layer_types=["sliding_attention", "full_attention"], **common,
        )  # fmt: skip
        model = transformers.Gemma3ForCausalLM(config)
    model.save_pretrained(directory)
    return directory


def save_tiny_gguf(path: Path) -> Path:
    """A random Llama of quantized matrices, of which one product has two types."""
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": MAX_MODEL_LEN,
    }  # fmt: skip
    types = [{"": "Q4_1", "ffn_down": "Q8_0"}, {"": "Q4_0", "attn_v": "Q5_1"}]
    return write_llama(path, types, sizes=sizes, std=0.8)


def make_config(path: Path, num_blocks: int | None) -> EngineConfig:
    """By default a pool of a dozen blocks and the null block, half as many again for Gemma 3."""
    info = read_model_info(path)
    num_blocks = num_blocks or (19 if info.architecture.startswith("Gemma3") else 13)
    model = ModelConfig(
        str(path), str(path), str(path), ("tiny",), info.architecture, info.hf_config, "float32",
        MAX_MODEL_LEN, VOCAB, 1,
    )  # fmt: skip
    return EngineConfig(
        model,
        CacheConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks),
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=12),
    )


@dataclass
class Engine:
    """Scheduler and worker, with results that may arrive late."""

    config: EngineConfig
    worker: Worker
    scheduler: Scheduler
    pending: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = field(default_factory=deque)

    def schedule(self) -> bool:
        step = self.scheduler.schedule()
        if step is None:
            return False
        assert (
            sum(step.num_scheduled_tokens.values())
            <= self.config.scheduler_config.max_num_batched_tokens
        )
        assert len(step.num_scheduled_tokens) <= self.config.scheduler_config.max_num_seqs
        self.pending.append((step, self.worker.execute_model(step)))
        return True

    def deliver(self) -> list[EngineCoreOutput]:
        return self.scheduler.update_from_output(*self.pending.popleft())


@dataclass
class ChoiceOutput:
    """What a choice has got so far; `logprobs` of its tokens, `scores` of prompt tokens."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    def add(self, output: EngineCoreOutput) -> None:
        """Append; nothing may be missing or come twice."""
        assert output.fault is None
        assert output.start == len(self.tokens)
        self.tokens += output.new_token_ids
        self.logprobs += [entry.logprobs[0] for entry in output.logprobs or []]
        if output.prompt_logprobs is not None:
            assert output.prompt_logprobs_start == len(self.scores) + 1
            self.scores += [entry.logprobs[0] for entry in output.prompt_logprobs]


class Machines:
    """One loaded worker; fresh cache, table and scheduler for each engine.

    With a method of `quantization` it computes in bfloat16, else in float32.
    """

    def __init__(
        self,
        path: Path,
        num_blocks: int | None = None,
        quantization: QuantizationMethod = "none",
    ) -> None:
        config = make_config(path, num_blocks)
        if quantization != "none":
            model_config = replace(config.model_config, dtype="bfloat16", quantization=quantization)
            config = replace(config, model_config=model_config)
        self.config = config
        self.worker = Worker(self.config)
        self.worker.init_device()
        torch.set_num_threads(1)
        self.worker.load_model(lambda phase: None)
        self._alone: dict[tuple[tuple[int, ...], int, int, int, int], ChoiceOutput] = {}

    def engine(self, prefix_caching: bool, budget: int = 12, max_num_seqs: int = 4) -> Engine:
        cache = replace(self.config.cache_config, enable_prefix_caching=prefix_caching)
        limits = replace(
            self.config.scheduler_config,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
        )
        config = replace(self.config, cache_config=cache, scheduler_config=limits)
        info = self.worker.init_kv_cache()
        return Engine(config, self.worker, Scheduler(config, info.kv_cache_spec, info.num_blocks))

    def alone(
        self, prompt: tuple[int, ...], seed: int, index: int, max_tokens: int, variant: int = 0
    ) -> ChoiceOutput:
        """Output of a choice run by itself in one chunk."""
        key = (prompt, seed, index, max_tokens, variant)
        if key not in self._alone:
            engine = self.engine(prefix_caching=False, budget=MAX_MODEL_LEN)
            request = make_request("alone", prompt, seed, max_tokens, [index], variant)
            engine.scheduler.add_request(request)
            result = self._alone[key] = ChoiceOutput()
            while engine.schedule():
                for output in engine.deliver():
                    result.add(output)
        return self._alone[key]


def make_request(
    name: str,
    prompt: tuple[int, ...],
    seed: int,
    max_tokens: int,
    indexes: list[int],
    variant: int = 0,
) -> EngineCoreRequest:
    """A greedy request if the seed is 0, else a random one; `variant` of `VARIANTS`."""
    fields = dict(VARIANTS[variant])
    bad_words = fields.pop("bad_words", None)
    fields["min_tokens"] = min(fields.get("min_tokens", 0), max_tokens)
    params = SamplingParams(
        temperature=0.0 if seed == 0 else 1.0,
        seed=seed,
        max_tokens=max_tokens,
        logprobs=1,
        stop_token_ids=[3],
        **fields,
    )
    params._bad_words_token_ids = bad_words
    params.n = max(indexes) + 1
    params.update_from_generation_config({}, 1)
    choices = [ChoiceState(index) for index in indexes]
    return EngineCoreRequest(name, list(prompt), params, 1, 0.0, choices)
