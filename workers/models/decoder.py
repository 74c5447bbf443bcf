"""The decoder-only transformer that all our model families are cases of."""

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from headrace.configs.errors import ModelFileError
from headrace.configs.quantization import INT8
from headrace.kernels.attention import AttentionMetadata, AttentionPlanner
from headrace.kernels.native import NativeKernels, NativeMetadata, NativePlanner
from headrace.kernels.rotary import (
    RotaryAngles,
    inverse_frequencies,
    rotary_table,
    select_angles,
)
from headrace.workers.kv_cache import KVCache
from headrace.workers.layers import (
    Attention,
    Embedding,
    GatedMLP,
    Linear,
    PackedLinear,
    RMSNorm,
    WeightSlot,
    linear,
)
from headrace.workers.layers.weight_slot import allocated
from headrace.workers.models.decoder_config import DecoderConfig
from headrace.workers.protocol import KVCacheSpec
from headrace.workers.weight_formats import UNQUANTIZED, MatrixFormats, WeightFormats

# A step's attention for one KV group, and what makes it; a model takes what its planners make.
StepAttention = AttentionMetadata | NativeMetadata
StepPlanner = AttentionPlanner | NativePlanner


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each normalized before and, in some families, after."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, eps, offset = config.hidden_size, config.norm_eps, config.norm_unit_offset
        self.attention = Attention(hidden, config.attention, dtype)
        self.mlp = GatedMLP(hidden, config.inner_size, config.activation, config.mlp_bias, dtype)
        self.input_norm = RMSNorm(hidden, eps, offset)
        self.mlp_norm = RMSNorm(hidden, eps, offset)
        self.attention_post_norm = RMSNorm(hidden, eps, offset) if config.post_norms else None
        self.mlp_post_norm = RMSNorm(hidden, eps, offset) if config.post_norms else None

    def forward(
        self,
        residual: torch.Tensor,
        angles: RotaryAngles,
        pages: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Residual stream in, residual stream out: [num_tokens, hidden_size] of one fixed dtype."""
        x = self.attention(self.input_norm(residual), angles, pages, metadata)
        if self.attention_post_norm is not None:
            x = self.attention_post_norm(x)
        residual = residual + x
        x = self.mlp(self.mlp_norm(residual))
        if self.mlp_post_norm is not None:
            x = self.mlp_post_norm(x)
        return residual + x

    def weight_slots(self, prefix: str) -> dict[str, WeightSlot]:
        slots = self.attention.weight_slots(f"{prefix}self_attn.")
        slots |= self.mlp.weight_slots(f"{prefix}mlp.")
        slots |= self.input_norm.weight_slots(f"{prefix}input_layernorm")
        if self.attention_post_norm is None or self.mlp_post_norm is None:
            return slots | self.mlp_norm.weight_slots(f"{prefix}post_attention_layernorm")
        slots |= self.attention_post_norm.weight_slots(f"{prefix}post_attention_layernorm")
        slots |= self.mlp_norm.weight_slots(f"{prefix}pre_feedforward_layernorm")
        return slots | self.mlp_post_norm.weight_slots(f"{prefix}post_feedforward_layernorm")


class Decoder(nn.Module):
    """A whole model.

    Made without memory for its weights; `allocate` gives it some, `weight_slots` says what goes
    where.

    The residual stream and the KV cache have the dtype of the weights. So do quantized weights:
    `stored_matrices` are to be read as they are in the file and rounded as they would be if they
    were quantized.
    """

    kernels: NativeKernels | None = None  # what its steps run on; None: torch

    def __init__(
        self, config: DecoderConfig, dtype: torch.dtype, formats: WeightFormats = UNQUANTIZED
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.formats = formats
        hidden, vocab = config.hidden_size, config.vocab_size
        self.embedding = Embedding(vocab, hidden, config.embedding_scale, dtype)
        self.layers = nn.ModuleList(DecoderLayer(config, dtype) for _ in config.layers)
        self.norm = RMSNorm(hidden, config.norm_eps, config.norm_unit_offset)
        self.head = None if config.is_head_tied else Linear("lm_head", hidden, vocab, False, dtype)
        try:
            head_dim = config.attention.head_dim
            self._frequencies = [inverse_frequencies(head_dim, rope) for rope in config.ropes]
        except (KeyError, ValueError) as error:
            raise ModelFileError(
                f"rotary parameters of the model cannot be used: {error}"
            ) from error
        self.rotary_tables: list[torch.Tensor] = []
        self.max_model_len = 0  # known once memory is allocated

    @property
    def num_weight_bytes(self) -> int:
        return sum(p.numel() * p.dtype.itemsize for p in self.parameters())

    @property
    def stored_matrices(self) -> frozenset[str]:
        """Matrices, by name, that are to be read as the file has them."""
        return frozenset(self._matrix_names()) if self.formats.method == INT8 else frozenset()

    @property
    def matrix_formats(self) -> MatrixFormats:
        """What the matrices are kept in."""
        dtype = str(self.dtype).removeprefix("torch.")
        return MatrixFormats(
            self.formats.method, Counter([dtype] * len(list(self._matrix_names())))
        )

    def num_rotary_bytes(self, max_model_len: int) -> int:
        """Of the tables that `allocate` makes."""
        return sum(2 * f.nbytes * max_model_len for f in self._frequencies)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Per layer, how many tokens a query sees; None: all."""
        return tuple(layer.window for layer in self.config.layers)

    def allocate(self, max_model_len: int) -> None:
        """Memory for weights (uninitialized), rotary tables for positions below `max_model_len`."""
        for module in self.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter.is_meta:
                    setattr(module, name, allocated(parameter))
        self.max_model_len = max_model_len
        self.rotary_tables = [rotary_table(f, max_model_len) for f in self._frequencies]

    def planners(self, spec: KVCacheSpec) -> list[StepPlanner]:
        """What makes the metadata of a step: one per KV group."""
        return [
            AttentionPlanner(
                spec.block_size, spec.num_kv_heads, spec.head_dim, self.dtype, group.window
            )
            for group in spec.groups
        ]

    def _products(self) -> Iterator[tuple[str, PackedLinear | Embedding]]:
        """Every matrix that a step multiplies with, in order, with the prefix of its names."""
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            prefix = f"model.layers.{index}."
            yield f"{prefix}self_attn.", layer.attention.qkv
            yield f"{prefix}self_attn.", layer.attention.output
            yield f"{prefix}mlp.", layer.mlp.gate_up
            yield f"{prefix}mlp.", layer.mlp.down
        yield ("model.", self.embedding) if self.head is None else ("", self.head)

    def _matrix_names(self) -> Iterator[str]:
        """The matrices of the checkpoint that they are made of."""
        for prefix, module in self._products():
            yield from (f"{prefix}{part}.weight" for part in module.parts)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Where each checkpoint tensor goes, by its name in transformers."""
        slots = self.embedding.weight_slots("model.embed_tokens")
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            slots |= layer.weight_slots(f"model.layers.{index}.")
        slots |= self.norm.weight_slots("model.norm")
        return slots | (self.head.weight_slots("") if self.head is not None else {})

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] int64 -> [num_tokens, hidden_size]"""
        embedded: torch.Tensor = self.embedding(token_ids)
        return embedded

    def forward(
        self,
        embedded: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: KVCache,
        metadata: Sequence[StepAttention],
    ) -> torch.Tensor:
        """Run all layers over a flat token batch; writes the new K and V to the cache.

        embedded: [num_tokens, hidden_size]; positions: [num_tokens] int64, for the rotary embedding
        only; metadata: one per KV group. Returns the residual stream, [num_tokens, hidden_size],
        before the final norm.
        """
        angles = [select_angles(table, positions) for table in self.rotary_tables]
        residual = embedded
        for layer, layer_config, pages, group in zip(
            self.layers,
            self.config.layers,
            kv_cache.layer_pages,
            kv_cache.layer_groups,
            strict=True,
        ):
            residual = layer(residual, angles[layer_config.rope], pages, metadata[group])
        return residual

    def compute_logits(self, residual: torch.Tensor) -> torch.Tensor:
        """Final norm and head: [num_rows, hidden_size] -> [num_rows, vocab_size] float32."""
        x = self.norm(residual)
        if self.head is None:
            logits = linear(x, self.embedding.weight).float()
        else:
            logits = self.head(x).float()
        cap = self.config.final_soft_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap
