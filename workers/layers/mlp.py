"""Gated feed-forward layer."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import nn
from torch.nn import functional

from headrace.workers.layers.linear import Linear, PackedLinear
from headrace.workers.layers.weight_slot import WeightSlot

_gelu_tanh = partial(functional.gelu, approximate="tanh")

# By the names that model configs use.
ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "silu": functional.silu,
        "swish": functional.silu,
        "gelu": functional.gelu,
        "gelu_pytorch_tanh": _gelu_tanh,
        "gelu_new": _gelu_tanh,
    }
)


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), with gate and up as one product.

    `adds_bias`: whether the bias of `down`, if there is one, is added here, and not by another
    shard.
    """

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        activation: str,
        bias: bool,
        dtype: torch.dtype,
        adds_bias: bool = True,
    ) -> None:
        super().__init__()
        self.inner_size = inner_size
        self.activation = ACTIVATIONS[activation]
        self.gate_up = PackedLinear(
            {"gate_proj": inner_size, "up_proj": inner_size}, hidden_size, bias, dtype
        )
        self.down = Linear("down_proj", inner_size, hidden_size, bias and adds_bias, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, hidden_size]"""
        gate_up = self.gate_up(x)
        gate, up = gate_up[:, : self.inner_size], gate_up[:, self.inner_size :]
        return self.down(self.activation(gate).mul_(up))

    def weight_slots(self, prefix: str) -> dict[str, WeightSlot]:
        return self.gate_up.weight_slots(prefix) | self.down.weight_slots(prefix)
