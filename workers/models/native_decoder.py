"""A decoder whose steps run as one native call: a list of operations made from its modules."""

import ctypes
import mmap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.kernels.native import (
    BLOCK_FORMATS,
    FORMATS,
    Epilogue,
    Format,
    Kind,
    NativeKernels,
    NativeMetadata,
    NativePlanner,
    Op,
    PackedMatrix,
    Step,
)
from headrace.kernels.native.interface import MAX_ROPES, Group
from headrace.workers.distributed import ALONE, Communicator
from headrace.workers.distributed.shared_memory import EMBEDDING_AREA, SharedMemoryCommunicator
from headrace.workers.kv_cache import KVCache
from headrace.workers.layers import Attention, Embedding, PackedLinear, RMSNorm
from headrace.workers.models.decoder import Decoder, DecoderLayer, StepAttention, StepPlanner
from headrace.workers.models.decoder_config import DecoderConfig
from headrace.workers.models.op_profile import OpProfile
from headrace.workers.models.sharding import ModelPart
from headrace.workers.protocol import KVCacheSpec
from headrace.workers.weight_formats import UNQUANTIZED, MatrixFormats, WeightFormats

_GATED_EPILOGUES = {
    "silu": Epilogue.SILU_MUL,
    "swish": Epilogue.SILU_MUL,
    "gelu_pytorch_tanh": Epilogue.GELU_MUL,
    "gelu_new": Epilogue.GELU_MUL,
}
_CACHE_FORMATS = {**FORMATS, torch.int8: Format.INT8}
_MAX_HEADS_TOGETHER = 96  # query heads of one K and V head: rows of an attention item

# Row buffers of a step, by number. BRANCH holds what a post-norm adds to the residual stream,
# PARTIAL, in float32, this shard's share of a branch: two buffers, since with common memory those
# after attention and after the feed-forward layer lie in different areas.
_RESIDUAL, _NORMED, _QKV, _ATTENDED, _INNER, _BRANCH, _LOGITS, *_PARTIALS = range(9)
_MIN_ROWS = 16
_CACHE_LINE = 64  # bytes; packed matrices begin at one


def obstacle(config: DecoderConfig, dtype: torch.dtype) -> str | None:
    """Why the native kernels cannot run this model; None if they can."""
    attention = config.attention
    if dtype not in FORMATS:
        return f"they do not compute in {dtype}"
    if config.activation not in _GATED_EPILOGUES:
        return f"they do not have the activation {config.activation}"
    if attention.head_dim % 2 or attention.num_heads % attention.num_kv_heads:
        return f"they cannot split {attention.num_heads} heads of {attention.head_dim} values"
    if attention.num_heads // attention.num_kv_heads > _MAX_HEADS_TOGETHER:
        return f"more than {_MAX_HEADS_TOGETHER} query heads share a K and V head"
    if len(config.ropes) > MAX_ROPES:
        return f"it has more than {MAX_ROPES} rotary embeddings"
    return None


@dataclass(frozen=True)
class _Sum:
    """Before the operation at `position`, the shards' parts are added up, for buffer `target`."""

    position: int
    source: int
    target: int


@dataclass(frozen=True)
class _Packing:
    """How the weight of a product (or of the embedding alone) is packed.

    `formats`: of its parts, by their names in the checkpoint.
    """

    module: PackedLinear | Embedding
    formats: dict[str, Format]
    is_gated: bool

    @property
    def matrices(self) -> list[tuple[Format, int]]:
        """Format and number of rows of each packed matrix: neighbours of one format share one."""
        matrices: list[tuple[Format, int]] = []
        for format, num_rows in zip(self.formats.values(), self.module.parts.values(), strict=True):
            if matrices and matrices[-1][0] is format:
                num_rows += matrices.pop()[1]
            matrices.append((format, num_rows))
        return matrices


class NativeDecoder(Decoder):
    """Same weights, same results within rounding, bitwise the same for any batch.

    The residual stream and the cache have the model's dtype; everything between two roundings to
    it, such as norm and rotary embedding of a head, or activation and product, is float32.
    Quantized matrices are multiplied as they are; what comes in is then rounded to 8 bits, per
    token in blocks of 32.
    """

    kernels: NativeKernels

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        kernels: NativeKernels,
        formats: WeightFormats = UNQUANTIZED,
        part: ModelPart | None = None,
        shards: Communicator = ALONE,
    ) -> None:
        super().__init__(config, dtype, formats, part, shards)
        self.kernels = kernels
        self._packings = list(self._plan_packings())
        self.op_profile: OpProfile | None = None  # times operations while it is there
        self._layer_ops: ctypes.Array[Op] | None = None
        self._sums: list[_Sum] = []  # over the shards, between the operations of the layers
        self._planned_for: KVCache | None = None
        self._head_ops: ctypes.Array[Op] | None = None
        self._common: SharedMemoryCommunicator | None = None  # of the shards, where they have it
        self._row_buffers: dict[int, torch.Tensor] = {}

    @property
    def num_weight_bytes(self) -> int:
        packed = [packing.module.weight for packing in self._packings]
        if not any(weight.is_meta for weight in packed):
            return super().num_weight_bytes
        unpacked = sum(weight.numel() * weight.dtype.itemsize for weight in packed)
        sizes = (self._matrix_bytes(p.module, *m) for p in self._packings for m in p.matrices)
        return super().num_weight_bytes - unpacked + sum(sizes)

    @property
    def stored_matrices(self) -> frozenset[str]:
        return frozenset(
            name
            for packing in self._packings
            for name, format in packing.formats.items()
            if format is not FORMATS[self.dtype]
        )

    @property
    def matrix_formats(self) -> MatrixFormats:
        counts: Counter[str] = Counter()
        unsupported: list[str] = []
        for packing in self._packings:
            counts.update(format.name for format in packing.formats.values())
            unsupported += (
                name
                for name, format in packing.formats.items()
                if self.formats.wanted(name) not in (None, format)
            )
        return MatrixFormats(self.formats.method, counts, tuple(unsupported))

    def allocate(self, max_model_len: int) -> None:
        """As `Decoder.allocate`; matrices get zeroed memory in the layout of the products.

        A head that shares the embedding's weight keeps it in that layout, and so does the lookup.
        """
        sizes = [self._matrix_bytes(p.module, *m) for p in self._packings for m in p.matrices]
        memory = iter(_huge_pages(sum(sizes)).split(sizes))
        for packing in self._packings:
            num_inputs = packing.module.weight.shape[1]
            matrices = []
            for format, num_rows in packing.matrices:
                shape = (num_rows, num_inputs)
                is_gated = packing.is_gated
                matrices.append(PackedMatrix(next(memory), format, *shape, self.kernels, is_gated))
            packing.module.pack(*matrices)
        super().allocate(max_model_len)
        if isinstance(self.shards, SharedMemoryCommunicator):
            self._common = self.shards
            self._common.reserve(self.config.hidden_size, self.config.vocab_size)

    def planners(self, spec: KVCacheSpec) -> list[StepPlanner]:
        return [NativePlanner(group.window) for group in spec.groups]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """As `Decoder.embed`."""
        if self._common is None:
            return super().embed(token_ids)
        assert self.embedding is not None
        num_tokens = len(token_ids)
        self._common.own_part(EMBEDDING_AREA)[:num_tokens] = self.embedding(token_ids)
        embedded = torch.empty(num_tokens, self.config.hidden_size, dtype=self.dtype)
        ops = (Op * 1)(self._common.sum_op(EMBEDDING_AREA, _RESIDUAL, Epilogue.STORE))
        self._run(ops, self._step(embedded))
        return embedded

    def forward(
        self,
        embedded: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: KVCache,
        metadata: Sequence[StepAttention],
    ) -> torch.Tensor:
        """As `Decoder.forward`, in one native call."""
        if self._planned_for is not kv_cache:
            ops, self._sums = self._plan_layers(kv_cache)
            self._layer_ops = _op_array(ops)
            self._planned_for = kv_cache
        assert self._layer_ops is not None
        residual = embedded.clone()
        groups = [group for group in metadata if isinstance(group, NativeMetadata)]
        assert len(groups) == len(kv_cache.spec.groups)
        step = self._step(residual)
        step.positions = positions.data_ptr()
        step.block_size = kv_cache.spec.block_size
        step.num_sequences = len(groups[0].context_lens)
        step.query_starts = _address(groups[0].query_starts)
        step.context_lens = _address(groups[0].context_lens)
        step.num_groups = len(groups)
        group_structs = (Group * len(groups))()
        for struct, group in zip(group_structs, groups, strict=True):
            struct.slots, struct.window = _address(group.slot_addresses), group.window or 0
        step.groups = group_structs
        for index, table in enumerate(self.rotary_tables):
            step.ropes[index] = table.data_ptr()
        first = 0
        for total in self._sums:
            self._run(self._layer_ops, step, first, total.position)
            self._add_up(total, residual)
            first = total.position
        self._run(self._layer_ops, step, first)
        return residual

    def _add_up(self, total: "_Sum", residual: torch.Tensor) -> None:
        """Sum the shards' shares of a branch; it joins the residual stream, or gets its norm first.

        With one rounding, as where a product joins the stream.
        """
        num_tokens = residual.shape[0]
        branch = self.shards.all_reduce(self._row_buffers[total.source][:num_tokens])
        if total.target == _RESIDUAL:
            residual.copy_(residual.float().add_(branch))
        else:
            self._row_buffers[total.target][:num_tokens] = branch

    def compute_logits(self, residual: torch.Tensor) -> torch.Tensor:
        """As `Decoder.compute_logits`; the logits are never rounded to its dtype."""
        if self._head_ops is None:
            head = self.embedding if self.head is None else self.head
            assert head is not None
            ops = _products(head, _RESIDUAL, _LOGITS, Epilogue.STORE_F32, self.norm)
            if self._common is not None:
                # Nobody writes before all have done with the logits of before, or reads too early.
                ops = [self._common.meet_op(), *ops, self._common.meet_op()]
            self._head_ops = _op_array(ops)
        residual = residual.contiguous()
        num_rows, vocab = residual.shape[0], self.part.vocab
        if self._common is None:
            own = torch.empty(num_rows, len(vocab))
        else:
            own = self._common.logits[:num_rows, vocab.start : vocab.stop]
        step = self._step(residual)
        step.buffers[_LOGITS], step.strides[_LOGITS] = own.data_ptr(), own.stride(0)
        self._run(self._head_ops, step)
        if self._common is not None:
            return self._capped(self._common.logits[:num_rows])
        return self._capped(self._all_logits(own))

    def _run(
        self, ops: "ctypes.Array[Op]", step: Step, first: int = 0, last: int | None = None
    ) -> None:
        if self.op_profile is None:
            self.kernels.run(ops, step, first, last)
        else:
            self.op_profile.run(self.kernels, ops, step, first, last)

    def _layers(self) -> Iterator[DecoderLayer]:
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            yield layer

    def _plan_packings(self) -> Iterator[_Packing]:
        """In the order in which a step reads them."""
        gated = {id(layer.mlp.gate_up) for layer in self._layers()}
        for prefix, module in self._products():
            yield self._plan_packing(prefix, module, id(module) in gated)
        if self.head is not None and self.embedding is not None:
            alone = self._plan_packing("model.", self.embedding, False)
            # Numbers are looked up where they lie; int8 would save no time here.
            if not set(BLOCK_FORMATS.values()).isdisjoint(alone.formats.values()):
                yield alone

    def _plan_packing(
        self, prefix: str, module: PackedLinear | Embedding, is_gated: bool
    ) -> _Packing:
        """The formats that are wanted, but for gate and up, whose rows are mixed, only one."""
        names = [f"{prefix}{part}.weight" for part in module.parts]
        formats = [self._format_of(name) for name in names]
        if is_gated and len(set(formats)) > 1:
            formats = [FORMATS[self.dtype]] * len(names)
        return _Packing(module, dict(zip(names, formats, strict=True)), is_gated)

    def _format_of(self, name: str) -> Format:
        """What is wanted, unless this part would begin or end within the blocks of a file."""
        wanted, share = self.formats.wanted(name), self.shares[name]
        if wanted is None or share is None or wanted not in BLOCK_FORMATS.values():
            return wanted or FORMATS[self.dtype]
        return wanted if share.is_whole_blocks(wanted.name) else FORMATS[self.dtype]

    def _matrix_bytes(self, module: PackedLinear | Embedding, format: Format, num_rows: int) -> int:
        num_bytes = self.kernels.packed_bytes(format, num_rows, module.weight.shape[1])
        return -(-num_bytes // _CACHE_LINE) * _CACHE_LINE

    def _plan_layers(self, kv_cache: KVCache) -> "tuple[list[Op], list[_Sum]]":
        ops: list[Op] = []
        sums: list[_Sum] = []
        for index, layer, layer_config in zip(
            self.part.layers, self._layers(), self.config.layers, strict=True
        ):
            qkv, gate_up = layer.attention.qkv, layer.mlp.gate_up
            pages, group = kv_cache.layer_pages[index], kv_cache.layer_groups[index]
            ops += _products(qkv, _RESIDUAL, _QKV, Epilogue.STORE, layer.input_norm)
            ops.append(_attention(layer.attention, layer_config.rope, pages, group))
            output, down = layer.attention.output, layer.mlp.down
            self._join(ops, sums, 0, output, _ATTENDED, layer.attention_post_norm)
            epilogue = _GATED_EPILOGUES[self.config.activation]
            ops += _products(gate_up, _RESIDUAL, _INNER, epilogue, layer.mlp_norm)
            self._join(ops, sums, 1, down, _INNER, layer.mlp_post_norm)
        return ops, sums

    def _join(
        self,
        ops: list[Op],
        sums: "list[_Sum]",
        area: int,
        module: PackedLinear,
        source: int,
        post_norm: RMSNorm | None,
    ) -> None:
        """The end of a branch: its last product, perhaps normalized, joins the residual stream.

        `area`: which of the shards' common areas it goes through.
        """
        target, epilogue = _RESIDUAL, Epilogue.ADD
        if post_norm is not None:
            target, epilogue = _BRANCH, Epilogue.STORE
        if self.shards.size == 1:
            ops += _products(module, source, target, epilogue)
        else:
            ops += _products(module, source, _PARTIALS[area], Epilogue.STORE_F32)
            if self._common is not None:
                ops.append(self._common.sum_op(area, target, epilogue))
            else:
                sums.append(_Sum(len(ops), _PARTIALS[area], target))
        if post_norm is not None:
            ops.append(_norm_add(post_norm))

    def _step(self, residual: torch.Tensor) -> Step:
        """The buffers for as many tokens as `residual` [num_tokens, hidden_size] has."""
        num_tokens = residual.shape[0]
        if not self._row_buffers or num_tokens > self._row_buffers[_NORMED].shape[0]:
            self._row_buffers = self._make_row_buffers(max(_MIN_ROWS, num_tokens))
        step = Step(num_tokens=num_tokens, format=FORMATS[self.dtype])
        for number, buffer in (*self._row_buffers.items(), (_RESIDUAL, residual)):
            step.buffers[number], step.strides[number] = buffer.data_ptr(), buffer.stride(0)
        return step

    def _make_row_buffers(self, num_rows: int) -> dict[int, torch.Tensor]:
        attention, hidden = self.config.attention, self.config.hidden_size
        num_heads = attention.num_heads + 2 * attention.num_kv_heads
        widths = {
            _NORMED: hidden,
            _QKV: num_heads * attention.head_dim,
            _ATTENDED: attention.num_heads * attention.head_dim,
            _INNER: self.config.inner_size,
        }
        if self.config.post_norms:
            widths[_BRANCH] = hidden
        buffers = {
            number: torch.empty(num_rows, self._row_stride(width), dtype=self.dtype)[:, :width]
            for number, width in widths.items()
        }
        for area, number in enumerate(_PARTIALS if self.shards.size > 1 else ()):
            common = self._common
            buffers[number] = (
                torch.empty(num_rows, hidden) if common is None else common.own_part(area)
            )
        return buffers

    def _row_stride(self, width: int) -> int:
        """An odd number of cache lines: several rows compete for no place of a cache."""
        per_line = _CACHE_LINE // self.dtype.itemsize
        return (-(-width // per_line) | 1) * per_line


def _products(
    module: PackedLinear | Embedding,
    source: int,
    target: int,
    epilogue: Epilogue,
    norm: RMSNorm | None = None,
) -> list[Op]:
    """A product of the rows of `source`, normalized first if there is a `norm`.

    It takes an operation for each of the matrices that the weight is packed in.
    """
    bias = module.bias if isinstance(module, PackedLinear) else None
    ops: list[Op] = []
    column = 0
    for matrix in module.packed:
        op = Op(
            kind=Kind.PRODUCT,
            epilogue=epilogue,
            input=source,
            output=target,
            normed=_NORMED,
            weight=matrix.data.data_ptr(),
            norm=0 if norm is None else norm.weight.data_ptr(),
            eps=0.0 if norm is None else norm.eps,
            bias=0 if bias is None else bias[column:].data_ptr(),
            num_outputs=matrix.num_outputs,
            num_inputs=matrix.num_inputs,
            format=matrix.format,
            is_input_kept=len(ops) > 0,
            output_column=column,
        )
        ops.append(op)
        column += matrix.num_outputs
    return ops


def _norm_add(norm: RMSNorm) -> Op:
    """The branch, normalized, joins the residual stream."""
    return Op(
        kind=Kind.NORM_ADD,
        input=_BRANCH,
        output=_RESIDUAL,
        norm=norm.weight.data_ptr(),
        num_inputs=norm.weight.shape[0],
        eps=norm.eps,
    )


def _attention(attention: Attention, rope: int, pages: torch.Tensor, group: int) -> Op:
    """Head norms, rotary embedding, cache write and attention."""
    shape, head_norm = attention.shape, attention.head_norm
    return Op(
        kind=Kind.ATTENTION,
        input=_QKV,
        output=_ATTENDED,
        rope=rope,
        norm=0 if head_norm is None else head_norm.weight.data_ptr(),
        eps=0.0 if head_norm is None else head_norm.eps,
        scale=shape.scale,
        soft_cap=shape.soft_cap or 0.0,
        group=group,
        pages=pages.data_ptr(),
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        cache_format=_CACHE_FORMATS[pages.dtype],
    )


def op_name(op: Op) -> str:
    """What an operation of a decoder's step is, as in profiles."""
    if op.kind == Kind.ATTENTION:
        return "attention"
    if op.kind in (Kind.SUM, Kind.MEET):
        return "shards"
    if op.kind != Kind.PRODUCT:
        return "norm"
    names = {_QKV: "qkv", _INNER: "gate_up", _LOGITS: "head"}
    return names.get(op.output) or {_ATTENDED: "o", _INNER: "down"}[op.input]


def _op_array(ops: Sequence[Op]) -> "ctypes.Array[Op]":
    return (Op * len(ops))(*ops)


def _address(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _huge_pages(num_bytes: int) -> torch.Tensor:
    """Zeroed bytes that the system may back with huge pages."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)  # keeps the memory alive
