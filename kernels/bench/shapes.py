"""Sizes of a model's kernels."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.kernels.native import Epilogue


@dataclass(frozen=True)
class Matrix:
    """One kind of weight matrix, with what a step does with the product."""

    name: str
    num_outputs: int
    num_inputs: int
    epilogue: Epilogue


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model with gated MLPs that the kernels depend on."""

    name: str
    hidden_size: int
    inner_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    def matrices(self) -> tuple[Matrix, ...]:
        """The matrices of a layer, and the head."""
        hidden, attended = self.hidden_size, self.num_heads * self.head_dim
        qkv = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return (
            Matrix("qkv", qkv, hidden, Epilogue.STORE),
            Matrix("o", hidden, attended, Epilogue.ADD),
            Matrix("gate_up", 2 * self.inner_size, hidden, Epilogue.SILU_MUL),
            Matrix("down", hidden, self.inner_size, Epilogue.ADD),
            Matrix("head", self.vocab_size, hidden, Epilogue.STORE_F32),
        )


DEFAULT_SHAPES = (
    ModelShape("SmolLM2 135M", 576, 1536, 9, 3, 64, 49152),
    ModelShape("Llama 3.2 1B", 2048, 8192, 32, 8, 64, 128256),
)


def shape_of(name: str, hf_config: Mapping[str, Any]) -> ModelShape:
    """From a normalized config; whatever its activation is, SiLU stands for it."""
    return ModelShape(
        name=name,
        hidden_size=hf_config["hidden_size"],
        inner_size=hf_config["intermediate_size"],
        num_heads=hf_config["num_attention_heads"],
        num_kv_heads=hf_config["num_key_value_heads"],
        head_dim=hf_config["head_dim"],
        vocab_size=hf_config["vocab_size"],
    )
