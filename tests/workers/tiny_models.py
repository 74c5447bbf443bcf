"""Tiny random models of transformers, and a hand-driven scheduler, for the tests of models, runner
and worker.
"""

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers

from headrace.configs.sampling_params import SamplingParams
from headrace.workers.kv_cache import KVCache, make_kv_cache_spec
from headrace.workers.models import Decoder, build_model, load_weights
from headrace.workers.protocol import (
    BlockCopy,
    CachedRequestData,
    ChoiceId,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)

VOCAB_SIZE = 131
MAX_MODEL_LEN = 256
NEAR_TIE = 1e-4

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": MAX_MODEL_LEN,
    "attn_implementation": "eager",
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Name -> (model class, config class, what differs from `_SIZES`).
_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "llama-tied": ("LlamaForCausalLM", "LlamaConfig", {"tie_word_embeddings": True}),
    "llama-biases": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 16, "num_key_value_heads": 6},
    ),
    "llama-3-rope": ("LlamaForCausalLM", "LlamaConfig", {"rope_parameters": _LLAMA3_ROPE}),
    "llama-linear-rope": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
    ),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": 20}),
    "mistral-full": ("MistralForCausalLM", "MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-windows": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {}),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 7,
            "sliding_window": 20,
            "query_pre_attn_scalar": 12,
            "final_logit_softcapping": 20.0,
            "pad_token_id": 0,
            "bos_token_id": 2,
            "eos_token_id": 1,
        },
    ),
}
MODEL_NAMES = tuple(_MODELS)


@cache
def make_reference(name: str) -> Any:
    """A transformers model in float32 with weights large enough for distinct logits."""
    model_class, config_class, changes = _MODELS[name]
    sizes = _SIZES | changes
    if name.startswith("qwen2"):
        sizes.pop("head_dim")
    torch.manual_seed(1)
    config = getattr(transformers, config_class)(**sizes)
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def make_decoder(reference: Any) -> Decoder:
    config = reference.config
    architecture = type(reference).__name__
    model = build_model(architecture, config.to_dict(), torch.float32, "test")
    model.allocate(MAX_MODEL_LEN)
    weights = dict(reference.state_dict())
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight")
    with torch.inference_mode():
        load_weights(model, weights.items(), "test")
    return model


def make_kv_cache(
    model: Decoder, num_blocks: int, block_size: int = 16, dtype: torch.dtype | None = None
) -> KVCache:
    """`dtype` None: that of the model."""
    attention, dtype = model.config.attention, dtype or model.dtype
    spec = make_kv_cache_spec(
        model.windows, block_size, attention.num_kv_heads, attention.head_dim, dtype
    )
    return KVCache(spec, num_blocks, dtype)


def reference_logits(reference: Any, token_ids: list[int]) -> torch.Tensor:
    """[len(token_ids), vocab] float32 of transformers, in one forward pass without a cache."""
    with torch.no_grad():
        logits: torch.Tensor = reference(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits


def assert_greedy(reference: Any, token_ids: list[int], num_prompt_tokens: int) -> None:
    """Each output token is the reference's best given those before it, or in a near tie with it."""
    logits = reference_logits(reference, token_ids)
    for position in range(num_prompt_tokens, len(token_ids)):
        row = logits[position - 1]
        gap = row.max() - row[token_ids[position]]
        assert gap <= NEAR_TIE, f"token {position} lies {gap:.2e} below the best"


class StepDriver:
    """Plays the scheduler by hand: shuffled block ids, any number of tokens per choice and step."""

    def __init__(
        self, execute: Callable[[SchedulerOutput], ModelRunnerOutput], kv_cache: KVCache
    ) -> None:
        self._execute = execute
        self.block_size = kv_cache.spec.block_size
        self.num_groups = len(kv_cache.spec.groups)
        self._free = list(range(1, kv_cache.num_blocks))
        random.Random(0).shuffle(self._free)
        self.tables: dict[ChoiceId, list[list[int]]] = {}
        self.computed: dict[ChoiceId, int] = {}
        self.tokens: dict[ChoiceId, list[int]] = {}  # prompt, then what was sampled
        self.num_prompt_tokens: dict[ChoiceId, int] = {}
        self._new: dict[ChoiceId, NewRequestData] = {}
        self._resumed: set[ChoiceId] = set()
        self._finished: list[ChoiceId] = []
        self._copies: list[BlockCopy] = []
        self.num_steps = 0

    def add(
        self, name: str, prompt: list[int], params: SamplingParams | None = None, index: int = 0
    ) -> ChoiceId:
        choice = ChoiceId(name, index)
        params = params or SamplingParams(temperature=0.0, max_tokens=None)
        self.tables[choice] = [[] for _ in range(self.num_groups)]
        self.computed[choice] = 0
        self.tokens[choice] = list(prompt)
        self.num_prompt_tokens[choice] = len(prompt)
        self._new[choice] = NewRequestData(choice, list(prompt), len(prompt), params, [], 0)
        return choice

    def fork(self, parent: ChoiceId, index: int, params: SamplingParams | None = None) -> ChoiceId:
        """A child that shares all prompt tokens but the last with `parent`, whose prompt is
        computed.
        """
        prompt = self.tokens[parent][: self.num_prompt_tokens[parent]]
        child = self.add(parent.request_id, prompt, params, index)
        num_shared = len(prompt) - 1
        num_full, rest = divmod(num_shared, self.block_size)
        for group, table in enumerate(self.tables[parent]):
            blocks = table[:num_full]
            if rest:
                copied = self._free.pop()
                self._copies.append(BlockCopy(table[num_full], copied))
                blocks = [*blocks, copied]
            self.tables[child][group] = blocks
        self.computed[child] = num_shared
        return child

    def preempt(self, choice: ChoiceId) -> None:
        """Give all its blocks back; the next step computes it again from the start."""
        for table in self.tables[choice]:
            self._free = table + self._free
        self.tables[choice] = [[] for _ in range(self.num_groups)]
        self.computed[choice] = 0
        self._resumed.add(choice)

    def finish(self, choice: ChoiceId) -> None:
        for table in self.tables.pop(choice):
            self._free = table + self._free
        self._finished.append(choice)

    def step(self, counts: dict[ChoiceId, int]) -> ModelRunnerOutput:
        new, cached = [], []
        for choice, count in counts.items():
            added = self._reach(choice, self.computed[choice] + count)
            if choice in self._new:
                data = self._new.pop(choice)
                data.block_ids = [list(table) for table in self.tables[choice]]
                data.num_computed_tokens = self.computed[choice]
                new.append(data)
            else:
                resumed = choice in self._resumed
                self._resumed.discard(choice)
                cached.append(
                    CachedRequestData(choice, added, self.computed[choice], resumed=resumed)
                )
            self.computed[choice] += count
        self.num_steps += 1
        output = self._execute(
            SchedulerOutput(self.num_steps, new, cached, counts, self._finished, self._copies)
        )
        self._finished, self._copies = [], []
        for choice, sampled in output.sampled.items():
            self.tokens[choice] += sampled.token_ids
        return output

    def _reach(self, choice: ChoiceId, num_tokens: int) -> list[list[int]]:
        added = []
        for table in self.tables[choice]:
            missing = -(-num_tokens // self.block_size) - len(table)
            blocks = [self._free.pop() for _ in range(missing)]
            table.extend(blocks)
            added.append(blocks)
        return added

    def run(self, lengths: dict[ChoiceId, int], chunk: int = 10**9) -> None:
        """Step until every choice has `lengths` tokens in all, at most `chunk` tokens of each per
        step.
        """
        while True:
            counts = {
                choice: min(chunk, len(self.tokens[choice]) - self.computed[choice])
                for choice, length in lengths.items()
                if len(self.tokens[choice]) < length
            }
            if not counts:
                return
            output = self.step(counts)
            assert not output.failed, output.failed
