"""What works on rows of activations or logits: norms, choosing and scoring tokens."""

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
    """Drawing one token from each row of logits."""

    def cases() -> Iterator[Case]:
        for shape in shapes:
            for num_rows in rows:
                yield _draw_case(kernels, shape, num_rows, "all tokens", 0, 1.0)
                yield _draw_case(kernels, shape, num_rows, "top-k 50, top-p 0.9", 50, 0.9)

    return Kernel("draw", lambda: _check_draw(kernels), cases)


def argmax_kernel(
    kernels: NativeKernels, shapes: Sequence[ModelShape], rows: Sequence[int]
) -> Kernel:
    """The best token of each row of logits: greedy sampling."""

    def cases() -> Iterator[Case]:
        for shape in shapes:
            for num_rows in rows:
                yield _argmax_case(kernels, shape, num_rows)

    return Kernel("argmax", lambda: _check_argmax(kernels), cases)


def score_kernel(
    kernels: NativeKernels, shapes: Sequence[ModelShape], rows: Sequence[int]
) -> Kernel:
    """Log-probabilities of one token and of the best ones of each row."""

    def cases() -> Iterator[Case]:
        for shape in shapes:
            for num_rows in rows:
                yield _score_case(kernels, shape, num_rows, 5)

    return Kernel("logprobs", lambda: _check_score(kernels), cases)


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
    drawn = kernels.draw(logits, _draw_rows(logits, 0, 1.0))
    if drawn != expected.tolist():
        raise CheckFailed(f"it draws {drawn}, the reference {expected.tolist()}")
    scores = torch.full_like(logits, torch.nan)
    drawn = kernels.draw(logits, _draw_rows(logits, top_k, 1.0), scores)
    kept = logits.topk(top_k).indices
    must_be_equal(scores.isfinite().nonzero()[:, 1].view(num_rows, -1), kept.sort().values, "top-k")
    if not all(token in row for token, row in zip(drawn, kept.tolist(), strict=True)):
        raise CheckFailed("it draws tokens that top-k excludes")


def _draw_rows(logits: torch.Tensor, top_k: int, top_p: float) -> "ctypes.Array[DrawRow]":
    return (DrawRow * len(logits))(
        *(
            DrawRow(
                row=row, best=best, top_p=top_p, seed=row, top_k=top_k, min_score=-math.inf,
                choice_index=0, output_index=row, temperature=1.0,
            )
            for row, best in enumerate(logits.argmax(dim=1).tolist())
        )
    )  # fmt: skip


def _draw_case(
    kernels: NativeKernels, shape: ModelShape, num_rows: int, name: str, top_k: int, top_p: float
) -> Case:
    logits = _random_logits(num_rows, shape.vocab_size)
    rows = _draw_rows(logits, top_k, top_p)

    def call() -> None:
        kernels.draw(logits, rows)

    return Case(
        shape.name, f"{name} of {shape.vocab_size}", num_rows, call, 1,
        num_bytes=4 * logits.numel(), num_operations=0, format=Format.F32, is_cold=False,
    )  # fmt: skip


def _random_logits(num_rows: int, vocab: int) -> torch.Tensor:
    return 3 * torch.randn((num_rows, vocab), generator=torch.Generator().manual_seed(0))


def _check_argmax(kernels: NativeKernels) -> None:
    """As torch finds them, also with ties and NaN."""
    logits = _random_logits(9, 1000).round()
    logits[3, 700] = torch.nan
    maxima, token_ids = kernels.argmax(logits)
    expected = logits.max(dim=1)
    if token_ids != expected.indices.tolist():
        raise CheckFailed(f"it finds {token_ids}, torch {expected.indices.tolist()}")
    must_be_equal(torch.tensor(maxima).nan_to_num(), expected.values.nan_to_num(), "maxima")


def _argmax_case(kernels: NativeKernels, shape: ModelShape, num_rows: int) -> Case:
    logits = _random_logits(num_rows, shape.vocab_size)
    return Case(
        shape.name, f"best of {shape.vocab_size}", num_rows, lambda: kernels.argmax(logits), 1,
        num_bytes=4 * logits.numel(), num_operations=0, format=Format.F32, is_cold=False,
    )  # fmt: skip


def _check_score(kernels: NativeKernels) -> None:
    """Log-probabilities near those in float64, ranks and the best as a sort has them."""
    logits, num_top = _random_logits(9, 1000), 7
    rows, maxima = list(range(9)), logits.amax(dim=1).tolist()
    scores, ids, ranks = kernels.score(logits, rows, [5] * 9, [num_top] * 9, maxima)
    order = logits.argsort(dim=1, descending=True)
    expected = torch.cat((torch.full((9, 1), 5), order[:, :num_top]), dim=1)
    must_be_equal(torch.from_numpy(ids), expected, "ids")
    exact = logits.double().log_softmax(dim=1).gather(1, expected)
    must_be_close(torch.from_numpy(scores), exact, 1e-5)
    must_be_equal(torch.from_numpy(ranks), 1 + (order == 5).nonzero()[:, 1], "ranks")


def _score_case(kernels: NativeKernels, shape: ModelShape, num_rows: int, num_top: int) -> Case:
    logits = _random_logits(num_rows, shape.vocab_size)
    rows, token_ids, tops = list(range(num_rows)), [5] * num_rows, [num_top] * num_rows
    maxima = logits.amax(dim=1).tolist()
    return Case(
        shape.name, f"{num_top} best of {shape.vocab_size}", num_rows,
        lambda: kernels.score(logits, rows, token_ids, tops, maxima), 1,
        num_bytes=4 * logits.numel(), num_operations=0, format=Format.F32, is_cold=False,
    )  # fmt: skip
