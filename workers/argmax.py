"""The best token of each row of logits."""

import torch

from headrace.kernels.native import NativeKernels


def argmax_rows(
    logits: torch.Tensor, kernels: NativeKernels | None
) -> tuple[list[float], list[int]]:
    """The largest of each row of `logits` [num_rows, vocab], float32, and the lowest id with it.

    NaN wins over all. On `kernels`, or on torch without them: the same exactly.
    """
    if kernels is not None:
        return kernels.argmax(logits)
    maxima, token_ids = logits.max(dim=-1)
    return maxima.tolist(), token_ids.tolist()
