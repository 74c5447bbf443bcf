"""Single native operations on torch tensors, and the instruction sets to test."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.kernels.attention import SequenceSlots
from headrace.kernels.native import (
    FORMATS,
    Epilogue,
    Kind,
    NativeKernels,
    NativePlanner,
    Op,
    PackedMatrix,
    Step,
    load_kernels,
)
from headrace.kernels.native.interface import Format, Group, open_library
from headrace.kernels.native.kernels import supported_isas

GATED = (Epilogue.SILU_MUL, Epilogue.GELU_MUL)


def available_isas() -> tuple[str, ...]:
    """What this machine can run; nothing where the library was not built."""
    try:
        return supported_isas(open_library())
    except OSError:
        return ()


def loaded(isa: str, num_threads: int) -> NativeKernels:
    """The kernels of an instruction set that is available."""
    result = load_kernels(isa, num_threads)
    assert result is not None
    return result


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of float32, rounded once: what an fma instruction gives.

    The product is exact in float64. A sum that is not is rounded to the odd one of its two
    neighbours, so that rounding it again gives what one rounding would (Boldo and Melquiond 2008).
    """
    product, wide = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + wide
    part = total - wide
    error = (wide - (total - part)) + (product - part)
    is_even = (total.view(np.int64) & 1) == 0
    odd = np.nextafter(total, np.copysign(np.inf, error))
    return np.where((error != 0) & is_even, odd, total).astype(np.float32)


def pack(kernels: NativeKernels, weight: torch.Tensor, is_gated: bool = False) -> PackedMatrix:
    """In the format of `weight`."""
    format = FORMATS[weight.dtype]
    data = torch.zeros(kernels.packed_bytes(format, *weight.shape), dtype=torch.uint8)
    matrix = PackedMatrix(data, format, weight.shape[0], weight.shape[1], kernels, is_gated)
    half = weight.shape[0] // 2 if is_gated else weight.shape[0]
    for start in range(0, weight.shape[0], half):
        matrix.fill(weight[start : start + half], start)
    return matrix


def run_op(kernels: NativeKernels, op: Op, buffers: Sequence[torch.Tensor]) -> None:
    step = Step(num_tokens=buffers[0].shape[0], format=FORMATS[buffers[0].dtype])
    for number, buffer in enumerate(buffers):
        step.buffers[number], step.strides[number] = buffer.data_ptr(), buffer.stride(0)
    kernels.run((Op * 1)(op), step)


def product(
    kernels: NativeKernels,
    x: torch.Tensor,
    matrix: PackedMatrix,
    epilogue: Epilogue = Epilogue.STORE_F32,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    column: int = 0,
) -> torch.Tensor:
    """The product in fresh memory filled with NaN, whose surplus columns must stay so."""
    width = matrix.num_outputs // 2 if epilogue in GATED else matrix.num_outputs
    dtype = torch.float32 if epilogue is Epilogue.STORE_F32 else x.dtype
    out = torch.full((x.shape[0], column + width + 3), torch.nan, dtype=dtype)
    columns = slice(column, column + width)
    if residual is not None:
        out[:, columns] = residual
    op = Op(
        kind=Kind.PRODUCT,
        epilogue=epilogue,
        input=0,
        output=1,
        weight=matrix.data.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        num_outputs=matrix.num_outputs,
        num_inputs=matrix.num_inputs,
        format=matrix.format,
        output_column=column,
    )
    run_op(kernels, op, (x, out))
    result = out[:, columns].clone(memory_format=torch.contiguous_format)
    out[:, columns] = torch.nan
    assert out.isnan().all()
    return result


# The number of each type of rows and caches.
CACHE_FORMATS = {**FORMATS, torch.int8: Format.INT8}


def packed_pages(
    pages: torch.Tensor, block_size: int, num_kv_heads: int, rows: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """A layer's pages in the layout of native attention for a step with `rows` of this type.

    `pages` [num_blocks * 2 * block_size, num_kv_heads * head_dim]: a row is a token's K or V.
    """
    head_dim = pages.shape[1] // num_kv_heads
    width = 2 if rows is torch.bfloat16 else 1  # what lies side by side
    whole = block_size // width * width
    shape = (-1, 2, block_size, num_kv_heads, head_dim)
    keys, values = pages.view(shape).transpose(2, 3).unbind(1)  # [blocks, heads, tokens, dims]
    parts = [
        keys.unflatten(3, (-1, width)).transpose(2, 3),
        values[:, :, :whole].unflatten(2, (-1, width)).transpose(3, 4),
        values[:, :, whole:],
    ]
    return torch.cat([part.flatten(2) for part in parts], dim=2).contiguous()


def unpacked_pages(
    packed: torch.Tensor, block_size: int, num_kv_heads: int, rows: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Rows as `packed_pages` takes them. `packed`: of the same size, in any shape."""
    blocks = packed.reshape(-1, num_kv_heads, 2, packed.shape[-1] // num_kv_heads * block_size)
    width = 2 if rows is torch.bfloat16 else 1
    whole = block_size // width * width
    head_dim = blocks.shape[3] // block_size
    keys, values = blocks.unbind(2)
    pairs = values[:, :, : whole * head_dim].unflatten(2, (-1, head_dim, width))
    rest = values[:, :, whole * head_dim :].unflatten(2, (-1, head_dim))
    tokens = (
        keys.unflatten(2, (-1, block_size, width)).transpose(2, 3).flatten(3),
        torch.cat((pairs.transpose(3, 4).flatten(2, 3), rest), dim=2),
    )
    return torch.stack(tokens, 1).transpose(2, 3).reshape(-1, num_kv_heads * head_dim)


@dataclass
class AttentionCall:
    """What attention operations on one cache have in common."""

    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None  # [num_heads] float32

    def attend(
        self,
        kernels: NativeKernels,
        query: torch.Tensor,
        packed: torch.Tensor,
        sequences: Sequence[SequenceSlots],
    ) -> torch.Tensor:
        """Attention of `query` [num_tokens, num_heads, head_dim] to what the cache holds."""
        return self._run(kernels, query.flatten(1), query.shape[1], packed, sequences, rope=-1)

    def write(
        self,
        kernels: NativeKernels,
        key_value: torch.Tensor,
        packed: torch.Tensor,
        sequence: SequenceSlots,
    ) -> None:
        """Write `key_value` [num_tokens, 2, num_kv_heads, head_dim], without turning anything."""
        num_tokens = key_value.shape[0]
        query = torch.zeros(num_tokens, self.num_kv_heads, self.head_dim, dtype=key_value.dtype)
        qkv = torch.cat((query, key_value.flatten(1, 2)), dim=1).flatten(1)
        self._run(kernels, qkv, self.num_kv_heads, packed, [sequence], rope=0)

    def _run(
        self,
        kernels: NativeKernels,
        qkv: torch.Tensor,
        num_heads: int,
        packed: torch.Tensor,
        sequences: Sequence[SequenceSlots],
        rope: int,
    ) -> torch.Tensor:
        num_tokens, head_dim = qkv.shape[0], self.head_dim
        out = torch.full((num_tokens, num_heads * head_dim), torch.nan, dtype=qkv.dtype)
        op = Op(kind=Kind.ATTENTION, input=0, output=1, scale=head_dim**-0.5, rope=rope)
        op.soft_cap = self.soft_cap or 0.0
        op.sinks = 0 if self.sinks is None else self.sinks.data_ptr()
        op.pages, op.cache_format = packed.data_ptr(), CACHE_FORMATS[packed.dtype]
        op.num_heads, op.num_kv_heads, op.head_dim = num_heads, self.num_kv_heads, head_dim
        plan = NativePlanner(self.window).plan(sequences)
        step = Step(
            num_tokens=num_tokens, num_sequences=len(sequences), format=CACHE_FORMATS[qkv.dtype]
        )
        step.block_size = self.block_size
        step.query_starts = plan.query_starts.__array_interface__["data"][0]
        step.context_lens = plan.context_lens.__array_interface__["data"][0]
        addresses = plan.slot_addresses.__array_interface__["data"][0]
        step.num_groups, step.groups = 1, (Group * 1)(Group(addresses, self.window or 0))
        positions = torch.zeros(num_tokens, dtype=torch.int64)
        table = torch.cat((torch.ones(head_dim // 2), torch.zeros(head_dim // 2)))
        step.positions, step.ropes[0] = positions.data_ptr(), table.data_ptr()
        for number, buffer in enumerate((qkv, out)):
            step.buffers[number], step.strides[number] = buffer.data_ptr(), buffer.stride(0)
        kernels.run((Op * 1)(op), step)
        return out.view(num_tokens, num_heads, head_dim)


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Bit for bit, but that a NaN may be any."""
    assert torch.equal(got.isnan(), want.isnan())
    np.testing.assert_array_equal(bits(got.nan_to_num(0.0)), bits(want.nan_to_num(0.0)))


def bits(tensor: torch.Tensor) -> np.ndarray:
    """For comparisons that tell NaN from NaN and 0 from -0."""
    view = torch.int32 if tensor.dtype is torch.float32 else torch.int16
    return tensor.contiguous().view(view).numpy()
