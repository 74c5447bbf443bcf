"""Attention: one new token of many sequences, of one long sequence, and whole prompts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.kernels.attention import SequenceSlots, block_slots
from headrace.kernels.bench.cases import (
    COLD_BYTES,
    FILLER,
    Case,
    Kernel,
    make_step,
    must_be_close,
    must_be_equal,
)
from headrace.kernels.bench.shapes import ModelShape
from headrace.kernels.native import Format, Kind, NativeKernels, NativePlanner, Op, Step
from headrace.kernels.native.interface import Group
from headrace.kernels.rotary import (
    apply_rotary_,
    inverse_frequencies,
    rotary_table,
    select_angles,
)

_BLOCK_SIZE = 16
_DTYPE = torch.bfloat16
_MAX_LAYERS = 32
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True)
class _Work:
    """Equal sequences, of each of which the last `num_queries` tokens are new."""

    name: str
    num_sequences: int
    context: int
    num_queries: int
    is_cold: bool = True


_WORK = (
    _Work("decode 64 x 200", 64, 200, 1),
    _Work("decode 1 x 8192", 1, 8192, 1),
    _Work("prefill 1024", 1, 1024, 1024, is_cold=False),
    # Nothing to attend to but the token itself: rotary embedding and the cache write.
    _Work("rotary and cache write", 64, 1, 1, is_cold=False),
)


def attention_kernel(kernels: NativeKernels, shapes: Sequence[ModelShape]) -> Kernel:
    """In bfloat16, with rotary embedding and the write to the cache."""

    def cases() -> Iterator[Case]:
        for shape in shapes:
            for work in _WORK:
                yield _case(kernels, shape, work)

    return Kernel("attention", lambda: _check(kernels), cases)


def _check(kernels: NativeKernels) -> None:
    """A prompt near float64; its last token the same when it comes alone, bit by bit."""
    heads, kv_heads, dim, length = 6, 2, 64, 150
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn((length, (heads + 2 * kv_heads) * dim), generator=generator).to(_DTYPE)
    shape = ModelShape("test", 0, 0, heads, kv_heads, dim, 0)
    whole = _Attention(kernels, shape, _Work("whole", 1, length, length), 1)
    whole.cache.zero_()
    whole.qkv[:] = qkv
    whole.run()
    result = whole.out.clone()
    must_be_close(result, _exact(qkv, shape), 0.02)
    last = _Attention(kernels, shape, _Work("last", 1, length, 1), 1)
    last.cache[:] = whole.cache
    last.qkv[:] = qkv[-1]
    last.run()
    must_be_equal(last.out[0], result[-1], "the last token alone")


def _exact(qkv: torch.Tensor, shape: ModelShape) -> torch.Tensor:
    """Of one sequence in float64, with keys as the cache has them: [num_tokens, heads * dim]."""
    length, groups = len(qkv), shape.num_heads // shape.num_kv_heads
    sizes = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    q, k, v = qkv.unflatten(1, (-1, shape.head_dim)).float().split(sizes, dim=1)
    angles = select_angles(_table(shape.head_dim, length), torch.arange(length))
    for turned in (q, k):
        apply_rotary_(turned, angles)
    q, k, v = (x.to(_DTYPE).double().transpose(0, 1) for x in (q, k, v))
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    scores = q @ k.transpose(1, 2) * shape.head_dim**-0.5
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    attended = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    return attended.transpose(0, 1).flatten(1)


def _case(kernels: NativeKernels, shape: ModelShape, work: _Work) -> Case:
    # Keys and values that a layer's queries see, and pairs of query and key.
    num_seen = work.num_sequences * work.context
    first = work.context - work.num_queries + 1
    num_pairs = work.num_sequences * (first + work.context) * work.num_queries // 2
    num_bytes = 2 * num_seen * shape.num_kv_heads * shape.head_dim * _DTYPE.itemsize
    num_layers = min(_MAX_LAYERS, max(1, COLD_BYTES // num_bytes)) if work.is_cold else 1
    attention = _Attention(kernels, shape, work, num_layers)
    heads = f"{shape.num_heads}/{shape.num_kv_heads} x {shape.head_dim}"
    return Case(
        model=shape.name,
        shape=f"{work.name}, {heads}",
        num_rows=work.num_sequences * work.num_queries,
        call=attention.run,
        num_kernels=num_layers,
        num_bytes=num_bytes,
        num_operations=4 * num_pairs * shape.num_heads * shape.head_dim,
        format=Format.BF16,
        is_cold=work.is_cold,
    )


class _Attention:
    """Attention of some layers, each with a cache of its own, to the same queries."""

    def __init__(
        self, kernels: NativeKernels, shape: ModelShape, work: _Work, num_layers: int
    ) -> None:
        self._kernels = kernels
        num_tokens = work.num_sequences * work.num_queries
        width = shape.num_heads + 2 * shape.num_kv_heads
        self.qkv = torch.full((num_tokens, width * shape.head_dim), 0.01, dtype=_DTYPE)
        self.out = torch.full(
            (num_tokens, shape.num_heads * shape.head_dim), torch.nan, dtype=_DTYPE
        )
        num_blocks = -(-work.context // _BLOCK_SIZE)
        self.cache = torch.full(
            (num_layers, 1 + work.num_sequences * num_blocks, 2 * _BLOCK_SIZE
             * shape.num_kv_heads * shape.head_dim * _DTYPE.itemsize),
            FILLER, dtype=torch.uint8,
        )  # fmt: skip
        self._ops = (Op * num_layers)()
        for op, pages in zip(self._ops, self.cache, strict=True):
            op.kind, op.input, op.output, op.rope = Kind.ATTENTION, 0, 1, 0
            op.scale, op.pages = shape.head_dim**-0.5, pages.data_ptr()
            op.num_heads, op.num_kv_heads = shape.num_heads, shape.num_kv_heads
            op.head_dim = shape.head_dim
        tables = (1 + number * num_blocks for number in range(work.num_sequences))
        slots = [
            block_slots(list(range(first, first + num_blocks)), _BLOCK_SIZE)[: work.context]
            for first in tables
        ]
        self._plan = NativePlanner(None).plan([SequenceSlots(s, work.num_queries) for s in slots])
        self._group = (Group * 1)(Group(_address(self._plan.slot_addresses), 0))
        new = np.arange(work.context - work.num_queries, work.context)
        self._positions = np.tile(new, work.num_sequences)
        self._table = _table(shape.head_dim, work.context)
        self._step = self._make_step()

    def run(self) -> None:
        self._kernels.run(self._ops, self._step)

    def _make_step(self) -> Step:
        step = make_step((self.qkv, self.out))
        step.num_sequences, step.block_size = len(self._plan.context_lens), _BLOCK_SIZE
        step.query_starts = _address(self._plan.query_starts)
        step.context_lens = _address(self._plan.context_lens)
        step.positions = _address(self._positions)
        step.num_groups, step.groups = 1, self._group
        step.ropes[0] = self._table.data_ptr()
        return step


def _table(head_dim: int, num_positions: int) -> torch.Tensor:
    return rotary_table(inverse_frequencies(head_dim, _ROPE), num_positions)


def _address(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
