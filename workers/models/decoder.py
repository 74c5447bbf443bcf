"""The decoder-only transformer that all our model families are cases of."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property

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
from headrace.workers.distributed import ALONE, Communicator
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
from headrace.workers.models.sharding import ModelPart, weight_shares, whole_model
from headrace.workers.protocol import KVCacheSpec
from headrace.workers.share import Share
from headrace.workers.weight_formats import UNQUANTIZED, MatrixFormats, WeightFormats

# A step's attention for one KV group, and what makes it; a model takes what its planners make.
StepAttention = AttentionMetadata | NativeMetadata
StepPlanner = AttentionPlanner | NativePlanner


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each normalized before and, in some families, after.

    Both are this shard's share, so what they give is summed over the `shards`.
    """

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, shards: Communicator) -> None:
        super().__init__()
        hidden, eps, offset = config.hidden_size, config.norm_eps, config.norm_unit_offset
        self.shards = shards
        is_first = shards.rank == 0
        self.attention = Attention(hidden, config.attention, dtype, adds_bias=is_first)
        self.mlp = GatedMLP(
            hidden, config.inner_size, config.activation, config.mlp_bias, dtype, adds_bias=is_first
        )
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
        x = self._sum(self.attention(self.input_norm(residual), angles, pages, metadata))
        if self.attention_post_norm is not None:
            x = self.attention_post_norm(x)
        residual = residual + x
        x = self._sum(self.mlp(self.mlp_norm(residual)))
        if self.mlp_post_norm is not None:
            x = self.mlp_post_norm(x)
        return residual + x

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.shards.size == 1 else self.shards.all_reduce(x)

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
    """A model, or the part of one that a worker has.

    Made without memory for its weights; `allocate` gives it some, `weight_slots` says what goes
    where.

    The residual stream and the KV cache have the dtype of the weights. So do quantized weights:
    `stored_matrices` are to be read as they are in the file and rounded as they would be if they
    were quantized.
    """

    kernels: NativeKernels | None = None  # what its steps run on; None: torch

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        formats: WeightFormats = UNQUANTIZED,
        part: ModelPart | None = None,
        shards: Communicator = ALONE,
    ) -> None:
        """`config`: of the whole model. `part` None: all of it. `shards`: those of the stage."""
        super().__init__()
        self.part = part or whole_model(config)
        self.shards = shards
        self.config = self.part.config
        self.dtype = dtype
        self.formats = formats
        config, part = self.config, self.part
        hidden, vocab = config.hidden_size, len(part.vocab)
        self.embedding = (
            Embedding(part.vocab, config.vocab_size, hidden, config.embedding_scale, dtype)
            if part.has_embedding
            else None
        )
        self.layers = nn.ModuleList(DecoderLayer(config, dtype, shards) for _ in config.layers)
        self.norm = (
            RMSNorm(hidden, config.norm_eps, config.norm_unit_offset)
            if part.place.is_last_stage
            else None
        )
        self.head = Linear("lm_head", hidden, vocab, False, dtype) if part.has_head else None
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
        """Per layer of the whole model, how many tokens a query sees; None: all."""
        return tuple(layer.window for layer in self.part.whole.layers)

    @cached_property
    def shares(self) -> dict[str, Share | None]:
        """The checkpoint's weights that it takes, and how much of each (None: all)."""
        return weight_shares(self.part)

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
        for index, layer in zip(self.part.layers, self.layers, strict=True):
            assert isinstance(layer, DecoderLayer)
            prefix = f"model.layers.{index}."
            yield f"{prefix}self_attn.", layer.attention.qkv
            yield f"{prefix}self_attn.", layer.attention.output
            yield f"{prefix}mlp.", layer.mlp.gate_up
            yield f"{prefix}mlp.", layer.mlp.down
        if self.head is not None:
            yield "", self.head
        elif self.embedding is not None:
            yield "model.", self.embedding

    def _matrix_names(self) -> Iterator[str]:
        """The matrices of the checkpoint that they are made of."""
        for prefix, module in self._products():
            yield from (f"{prefix}{part}.weight" for part in module.parts)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Where each checkpoint tensor goes, by its name in transformers."""
        slots: dict[str, WeightSlot] = {}
        if self.embedding is not None:
            slots |= self.embedding.weight_slots("model.embed_tokens")
        for index, layer in zip(self.part.layers, self.layers, strict=True):
            assert isinstance(layer, DecoderLayer)
            slots |= layer.weight_slots(f"model.layers.{index}.")
        if self.norm is not None:
            slots |= self.norm.weight_slots("model.norm")
        return slots | (self.head.weight_slots("") if self.head is not None else {})

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] int64 -> [num_tokens, hidden_size]; the first stage has it."""
        assert self.embedding is not None
        embedded: torch.Tensor = self.embedding(token_ids)
        # Every token is in one shard, and zero in the others.
        return embedded if self.shards.size == 1 else self.shards.all_reduce(embedded)

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
        for index, layer, layer_config in zip(
            self.part.layers, self.layers, self.config.layers, strict=True
        ):
            group = metadata[kv_cache.layer_groups[index]]
            pages = kv_cache.layer_pages[index]
            residual = layer(residual, angles[layer_config.rope], pages, group)
        return residual

    def compute_logits(self, residual: torch.Tensor) -> torch.Tensor:
        """Final norm and head: [num_rows, hidden_size] -> [num_rows, vocab_size] float32.

        The last stage has them; each of its shards gets all logits.
        """
        assert self.norm is not None
        x = self.norm(residual)
        if self.head is not None:
            logits = self.head(x).float()
        else:
            assert self.embedding is not None
            logits = linear(x, self.embedding.weight).float()
        return self._capped(self._all_logits(logits))

    def _all_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Those of all shards, side by side."""
        if self.shards.size == 1:
            return logits
        vocab, width = self.config.vocab_size, max(1, len(self.part.widest_vocab))
        wide = logits.new_zeros(logits.shape[0], width)
        wide[:, : logits.shape[1]] = logits
        return torch.cat(self.shards.all_gather(wide), dim=1)[:, :vocab]

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        cap = self.config.final_soft_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap
