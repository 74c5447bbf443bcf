"""Single native operations on torch tensors, and the instruction sets to test."""

from collections.abc import Sequence

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
)
from headrace.kernels.native.interface import Group, open_library
from headrace.kernels.native.kernels import supported_isas

GATED = (Epilogue.SILU_MUL, Epilogue.GELU_MUL)


def available_isas() -> tuple[str, ...]:
    """What this machine can run; nothing where the library was not built."""
    try:
        return supported_isas(open_library())
    except OSError:
        return ()


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
    step = Step(num_tokens=buffers[0].shape[0])
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
) -> torch.Tensor:
    """The product in fresh memory filled with NaN, whose surplus columns must stay so."""
    width = matrix.num_outputs // 2 if epilogue in GATED else matrix.num_outputs
    dtype = torch.float32 if epilogue is Epilogue.STORE_F32 else torch.bfloat16
    out = torch.full((x.shape[0], width + 3), torch.nan, dtype=dtype)
    if residual is not None:
        out[:, :width] = residual
    op = Op(
        kind=Kind.PRODUCT,
        epilogue=epilogue,
        input=0,
        output=1,
        weight=matrix.data.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        num_outputs=matrix.num_outputs,
        num_inputs=matrix.num_inputs,
    )
    run_op(kernels, op, (x, out))
    assert out[:, width:].isnan().all()
    return out[:, :width].contiguous()


def attention(
    kernels: NativeKernels,
    query: torch.Tensor,
    pages: torch.Tensor,
    sequences: Sequence[SequenceSlots],
    block_size: int,
    num_kv_heads: int,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Attention of bf16 `query` [num_tokens, num_heads, head_dim] to what `pages` holds."""
    num_tokens, num_heads, head_dim = query.shape
    flat = query.reshape(num_tokens, -1)
    out = torch.full_like(flat, torch.nan)
    op = Op(kind=Kind.ATTENTION, input=0, output=1, scale=head_dim**-0.5, rope=-1)
    op.soft_cap = soft_cap or 0.0
    op.pages, op.num_heads, op.num_kv_heads = pages.data_ptr(), num_heads, num_kv_heads
    op.head_dim = head_dim
    plan = NativePlanner(window).plan(sequences)
    step = Step(num_tokens=num_tokens, num_sequences=len(sequences), block_size=block_size)
    step.query_starts = plan.query_starts.__array_interface__["data"][0]
    step.context_lens = plan.context_lens.__array_interface__["data"][0]
    groups = (Group * 1)(Group(plan.slot_addresses.__array_interface__["data"][0], window or 0))
    step.num_groups, step.groups = 1, groups
    for number, buffer in enumerate((flat, out)):
        step.buffers[number], step.strides[number] = buffer.data_ptr(), buffer.stride(0)
    kernels.run((Op * 1)(op), step)
    return out.view_as(query)


def bits(tensor: torch.Tensor) -> np.ndarray:
    """For comparisons that tell NaN from NaN and 0 from -0."""
    view = torch.int32 if tensor.dtype is torch.float32 else torch.int16
    return tensor.contiguous().view(view).numpy()
