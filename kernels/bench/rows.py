"""What works on rows of activations or scores: norms, and drawing tokens."""

import ctypes
import math
from collections.abc import Iterator, Sequence

import torch

from headrace.kernels.bench.cases import (
    Case,
    CheckFailed,
    Kernel,
    make_step,
    must_be_close,
    must_be_equal,
    run_op,
)
from headrace.kernels.bench.shapes import ModelShape
from headrace.kernels.native import DrawRow, Format, Kind, NativeKernels, Op
from headrace.kernels.rms_norm import rms_norm
from headrace.kernels.sampling import gumbel_max

_EPS = 1e-5
_DTYPE = torch.bfloat16
_NORMS_TOGETHER = 16  # in one call, which one alone would be too short for


def norm_kernel(
    kernels: NativeKernels, shapes: Sequence[ModelShape], rows: Sequence[int]
) -> Kernel:
    """Normalization by the root mean square, of rows that lie in the caches as in a step."""

    def cases() -> Iterator[Case]:
        for shape in shapes:
            for num_rows in rows:
                yield _norm_case(kernels, shape, num_rows)

    return Kernel("norm", lambda: _check_norm(kernels), cases)


def draw_kernel(
    kernels: NativeKernels, shapes: Sequence[ModelShape], rows: Sequence[int]
) -> Kernel:
    """Drawing one token from each row of scores."""

    def cases() -> Iterator[Case]:
        for shape in shapes:
            for num_rows in rows:
                yield _draw_case(kernels, shape, num_rows, "all tokens", 0, 1.0)
                yield _draw_case(kernels, shape, num_rows, "top-k 50, top-p 0.9", 50, 0.9)

    return Kernel("draw", lambda: _check_draw(kernels), cases)


def _check_norm(kernels: NativeKernels) -> None:
    """Near the reference in float32; a row's bits need no other rows."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((37, 100), generator=generator).to(_DTYPE)
    weight = torch.randn(100, generator=generator)
    out = torch.full_like(x, torch.nan)
    run_op(kernels, _norm_op(weight), (x, out))
    expected = rms_norm(x.float(), weight, _EPS)
    must_be_close(out, expected, torch.finfo(_DTYPE).eps * expected.abs().max().item())
    alone = torch.full_like(x[:1], torch.nan)
    run_op(kernels, _norm_op(weight), (x[20:21], alone))
    must_be_equal(alone[0], out[20], "a row alone")


def _norm_case(kernels: NativeKernels, shape: ModelShape, num_rows: int) -> Case:
    weight = torch.ones(shape.hidden_size)
    x = torch.ones(num_rows, shape.hidden_size, dtype=_DTYPE)
    out = torch.empty_like(x)
    ops, step = (Op * _NORMS_TOGETHER)(*[_norm_op(weight)] * _NORMS_TOGETHER), make_step((x, out))

    def call() -> tuple[torch.Tensor, ...]:
        kernels.run(ops, step)
        return x, out, weight  # which live as long as this function

    return Case(
        shape.name, f"{shape.hidden_size} values", num_rows, call, _NORMS_TOGETHER,
        num_bytes=2 * x.numel() * _DTYPE.itemsize, num_operations=0, format=Format.F32,
        is_cold=False,
    )  # fmt: skip


def _norm_op(weight: torch.Tensor) -> Op:
    return Op(
        kind=Kind.NORM, input=0, output=1, norm=weight.data_ptr(), num_inputs=len(weight), eps=_EPS
    )


def _check_draw(kernels: NativeKernels) -> None:
    """The tokens that the reference draws; as many stay as top-k says."""
    num_rows, vocab, top_k = 9, 1000, 7
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn((num_rows, vocab), generator=generator)
    numbers = torch.arange(num_rows)
    expected = gumbel_max(
        logits - logits.amax(dim=1, keepdim=True), numbers, torch.zeros_like(numbers), numbers
    )
    drawn = kernels.draw(logits.clone(), _draw_rows(num_rows, 0, 1.0))
    if drawn != expected.tolist():
        raise CheckFailed(f"it draws {drawn}, the reference {expected.tolist()}")
    scores = logits.clone()
    drawn = kernels.draw(scores, _draw_rows(num_rows, top_k, 1.0))
    kept = logits.topk(top_k).indices
    must_be_equal(scores.isfinite().nonzero()[:, 1].view(num_rows, -1), kept.sort().values, "top-k")
    if not all(token in row for token, row in zip(drawn, kept.tolist(), strict=True)):
        raise CheckFailed("it draws tokens that top-k excludes")


def _draw_rows(num_rows: int, top_k: int, top_p: float) -> "ctypes.Array[DrawRow]":
    return (DrawRow * num_rows)(
        *(
            DrawRow(
                top_p=top_p, seed=row, top_k=top_k, min_score=-math.inf, choice_index=0,
                output_index=row, temperature=1.0,
            )
            for row in range(num_rows)
        )
    )  # fmt: skip


def _draw_case(
    kernels: NativeKernels, shape: ModelShape, num_rows: int, name: str, top_k: int, top_p: float
) -> Case:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((num_rows, shape.vocab_size), generator=generator)
    scores, rows = torch.empty_like(logits), _draw_rows(num_rows, top_k, top_p)

    def call() -> None:
        scores.copy_(logits)  # a draw changes them: part of the time
        kernels.draw(scores, rows)

    return Case(
        shape.name, f"{name} of {shape.vocab_size}", num_rows, call, 1,
        num_bytes=2 * 4 * logits.numel(), num_operations=0, format=Format.F32, is_cold=False,
    )  # fmt: skip
