"""Native normalization, and rotary embedding with the cache write, against the references."""

import ctypes
import time

import numpy as np
import pytest
import torch

from headrace.kernels.attention import SequenceSlots, block_slots
from headrace.kernels.native import (
    Format,
    Kind,
    NativeKernels,
    NativePlanner,
    Op,
    Step,
    load_kernels,
)
from headrace.kernels.native.interface import Group
from headrace.kernels.rms_norm import rms_norm
from headrace.kernels.rotary import (
    apply_rotary_,
    inverse_frequencies,
    rotary_table,
    select_angles,
)
from tests.kernels.native_ops import available_isas, bits, pack, run_op, unpacked_pages

pytestmark = pytest.mark.skipif(not available_isas(), reason="no native kernels on this machine")


@pytest.fixture(scope="module", params=available_isas())
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    loaded = load_kernels(request.param, 2)
    assert loaded is not None
    return loaded


CLOSE = {
    torch.bfloat16: {"rtol": 2**-8, "atol": 1e-6},
    torch.float16: {"rtol": 2**-11, "atol": 2**-24},
    torch.float32: {"rtol": 1e-6, "atol": 1e-6},
}


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("size", (1, 15, 16, 17, 63, 100, 576, 2000))
def test_norm(kernels: NativeKernels, dtype: torch.dtype, size: int) -> None:
    x, weight = torch.randn(37, size).to(dtype), torch.randn(size)
    expected = rms_norm(x.float(), weight, 1e-5)
    op = Op(kind=Kind.NORM, input=0, output=1, norm=weight.data_ptr(), num_inputs=size, eps=1e-5)
    out = torch.full((37, size + 5), torch.nan, dtype=dtype)
    run_op(kernels, op, (x, out))
    assert out[:, size:].isnan().all()
    torch.testing.assert_close(out[:, :size].float(), expected, **CLOSE[dtype])
    alone = torch.empty(1, size, dtype=dtype)
    run_op(kernels, op, (x[20:21], alone))
    np.testing.assert_array_equal(bits(alone[0]), bits(out[20, :size]))
    op.kind = Kind.NORM_ADD
    added = torch.randn(37, size).to(dtype)
    expected += added.float()
    run_op(kernels, op, (x, added))
    close = {**CLOSE[dtype], "atol": CLOSE[dtype]["rtol"]}
    torch.testing.assert_close(added.float(), expected, **close)


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_norm_of_what_is_not_finite(kernels: NativeKernels, dtype: torch.dtype) -> None:
    """Stays in its row; eps counts where a row is all but zero."""
    x, weight = torch.randn(5, 40).to(dtype), torch.randn(40)
    op = Op(kind=Kind.NORM, input=0, output=1, norm=weight.data_ptr(), num_inputs=40, eps=1e-5)
    want, out = torch.empty_like(x), torch.empty_like(x)
    run_op(kernels, op, (x, want))
    x[1, 39], x[3, 2], x[4] = torch.nan, torch.inf, 1e-4
    run_op(kernels, op, (x, out))
    np.testing.assert_array_equal(bits(out)[[0, 2]], bits(want)[[0, 2]])
    assert out[1].isnan().all() and out[3, 2].isnan() and not out[3, :2].any()
    expected = (x[4].float() / (1e-8 + 1e-5) ** 0.5 * weight).to(dtype)
    torch.testing.assert_close(out[4], expected, rtol=2**-7, atol=0.0)


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize(("rows", "inputs"), ((3, 100), (70, 1000)))
def test_norm_before_a_product(
    kernels: NativeKernels, dtype: torch.dtype, rows: int, inputs: int
) -> None:
    """The same as one after the other, whether every thread normalizes all rows or its own."""
    x, norm = torch.randn(rows, inputs).to(dtype), torch.randn(inputs)
    matrix = pack(kernels, torch.randn(50, inputs).to(dtype))
    normed, want = torch.full_like(x, torch.nan), torch.full((rows, 50), torch.nan, dtype=dtype)
    op = Op(kind=Kind.NORM, input=0, output=1, norm=norm.data_ptr(), num_inputs=inputs, eps=1e-5)
    run_op(kernels, op, (x, normed))
    op.kind, op.output, op.normed, op.num_outputs = Kind.PRODUCT, 1, 2, 50
    op.weight, op.format, op.norm = matrix.data.data_ptr(), matrix.format, 0
    run_op(kernels, op, (normed, want))
    op.norm = norm.data_ptr()
    out = torch.full_like(want, torch.nan)
    run_op(kernels, op, (x, out, torch.full_like(x, torch.nan)))
    np.testing.assert_array_equal(bits(out), bits(want))


def norm_chain(kernels: NativeKernels, num_ops: int) -> tuple["ctypes.Array[Op]", Step]:
    """Norms back and forth between two buffers, which live as long as the step."""
    buffers, weight = [torch.randn(3, 40), torch.zeros(3, 40)], torch.rand(40) + 0.5
    ops = (Op * num_ops)()
    for i, op in enumerate(ops):
        op.kind, op.input, op.output = Kind.NORM, i % 2, 1 - i % 2
        op.norm, op.num_inputs, op.eps = weight.data_ptr(), 40, 1e-5
    step = Step(num_tokens=3, format=Format.F32)
    for number, buffer in enumerate(buffers):
        step.buffers[number], step.strides[number] = buffer.data_ptr(), buffer.stride(0)
    step.held = (buffers, weight)
    return ops, step


def test_running_in_slices(kernels: NativeKernels) -> None:
    torch.manual_seed(0)
    ops, step = norm_chain(kernels, 7)
    kernels.run(ops, step)
    want = [bits(buffer).copy() for buffer in step.held[0]]
    torch.manual_seed(0)
    ops, step = norm_chain(kernels, 7)
    for first, last in ((0, 0), (0, 1), (1, 4), (4, 7), (7, 7)):
        kernels.run(ops, step, first, last)
    for buffer, expected in zip(step.held[0], want, strict=True):
        np.testing.assert_array_equal(bits(buffer), expected)
    for first, last in ((-1, 2), (2, 1), (0, 8)):
        with pytest.raises(ValueError, match=f"operations {first} to {last} of 7"):
            kernels.run(ops, step, first, last)


def test_seconds_of_operations(kernels: NativeKernels) -> None:
    """They are added to those of the slice that runs, and are no more than the call takes."""
    ops, step = norm_chain(kernels, 6)
    seconds = torch.zeros(6, dtype=torch.float64)
    step.op_seconds = seconds.data_ptr()
    start = time.perf_counter()
    kernels.run(ops, step)
    once = seconds.clone()
    assert (once > 0).all() and once.sum() <= time.perf_counter() - start
    kernels.run(ops, step, 2, 4)
    assert ((seconds > once) == torch.tensor([False, False, True, True, False, False])).all()
    assert step.op_seconds == seconds.data_ptr()


@pytest.mark.parametrize("has_norms", (False, True))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), ((9, 3, 64), (4, 1, 256), (3, 3, 10), (2, 1, 80))
)
def test_rotary(
    kernels: NativeKernels, heads: int, kv_heads: int, dim: int, has_norms: bool
) -> None:
    """Two sequences, the second of which continues: queries in place, K and V in the cache."""
    block_size, lengths, counts = 4, (7, 11), (7, 2)
    num_tokens, num_heads = sum(counts), heads + 2 * kv_heads
    qkv = torch.randn(num_tokens, num_heads, dim).bfloat16()
    weight = torch.randn(heads + kv_heads, dim) if has_norms else None
    table = rotary_table(inverse_frequencies(dim, {"rope_type": "default", "rope_theta": 1e4}), 20)
    positions = torch.cat([torch.arange(n - c, n) for n, c in zip(lengths, counts, strict=True)])

    expected = qkv.float()
    rotated = expected[:, : heads + kv_heads]
    if weight is not None:
        rotated.copy_(rms_norm(rotated, weight, 1e-6))
    apply_rotary_(rotated, select_angles(table, positions))

    slots = [block_slots([5, 2], block_size)[:7], block_slots([1, 6, 3], block_size)[:11]]
    plan = NativePlanner(None).plan(
        [SequenceSlots(s, c) for s, c in zip(slots, counts, strict=True)]
    )
    pages = torch.full((8 * 2 * block_size, kv_heads * dim), torch.nan).bfloat16()
    op = Op(kind=Kind.ATTENTION, input=0, output=1, eps=1e-6, pages=pages.data_ptr())
    op.norm = 0 if weight is None else weight.data_ptr()
    op.num_heads, op.num_kv_heads, op.head_dim = heads, kv_heads, dim
    step = Step(num_tokens=num_tokens, num_sequences=2, block_size=block_size, num_groups=1)
    step.query_starts = plan.query_starts.__array_interface__["data"][0]
    step.context_lens = plan.context_lens.__array_interface__["data"][0]
    step.positions = positions.data_ptr()
    step.groups = (Group * 1)(Group(plan.slot_addresses.__array_interface__["data"][0], 0))
    step.ropes[0] = table.data_ptr()
    attended = torch.empty(num_tokens, heads * dim).bfloat16()
    step.buffers[0], step.strides[0] = qkv.data_ptr(), num_heads * dim
    step.buffers[1], step.strides[1] = attended.data_ptr(), heads * dim
    kernels.run((Op * 1)(op), step)
    pages = unpacked_pages(pages, block_size, kv_heads, torch.bfloat16)

    close = {"rtol": 2**-8, "atol": 1e-5}
    torch.testing.assert_close(qkv[:, :heads].float(), expected[:, :heads], **close)
    rows = torch.from_numpy(np.concatenate([slots[0], slots[1][-2:]]))
    keys = pages[rows].view(num_tokens, kv_heads, dim).float()
    torch.testing.assert_close(keys, expected[:, heads : heads + kv_heads], **close)
    values = pages[rows + block_size].view(num_tokens, kv_heads, dim).float()
    assert torch.equal(values, expected[:, heads + kv_heads :])
    written = torch.cat((rows, rows + block_size))
    assert pages.isnan().all(-1).sum() == len(pages) - len(written)
