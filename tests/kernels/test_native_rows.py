"""Native normalization, and rotary embedding with the cache write, against the references."""

import numpy as np
import pytest
import torch

from headrace.kernels.attention import SequenceSlots, block_slots
from headrace.kernels.native import Kind, NativeKernels, NativePlanner, Op, Step, load_kernels
from headrace.kernels.native.interface import Group
from headrace.kernels.rms_norm import rms_norm
from headrace.kernels.rotary import (
    apply_rotary_,
    inverse_frequencies,
    rotary_table,
    select_angles,
)
from tests.kernels.native_ops import available_isas, bits, run_op, unpacked_pages

pytestmark = pytest.mark.skipif(not available_isas(), reason="no native kernels on this machine")


@pytest.fixture(scope="module", params=available_isas())
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    loaded = load_kernels(request.param, 2)
    assert loaded is not None
    return loaded


@pytest.mark.parametrize("size", (1, 63, 100, 576, 2000))
def test_norm(kernels: NativeKernels, size: int) -> None:
    x, weight = torch.randn(37, size).bfloat16(), torch.randn(size)
    expected = rms_norm(x.float(), weight, 1e-5)
    op = Op(kind=Kind.NORM, input=0, output=1, norm=weight.data_ptr(), num_inputs=size, eps=1e-5)
    out = torch.full((37, size + 5), torch.nan).bfloat16()
    run_op(kernels, op, (x, out))
    assert out[:, size:].isnan().all()
    torch.testing.assert_close(out[:, :size].float(), expected, rtol=2**-8, atol=1e-6)
    alone = torch.empty(1, size).bfloat16()
    run_op(kernels, op, (x[20:21], alone))
    np.testing.assert_array_equal(bits(alone[0]), bits(out[20, :size]))
    op.kind = Kind.NORM_ADD
    added = torch.randn(37, size).bfloat16()
    expected += added.float()
    run_op(kernels, op, (x, added))
    torch.testing.assert_close(added.float(), expected, rtol=2**-8, atol=2**-8)


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
