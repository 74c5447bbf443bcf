"""Times of a native decoder's operations, with what they read and compute."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from headrace.kernels.native import Format, Kind, NativeKernels, Op, Step

_CACHE_BYTES = {Format.F32: 4, Format.INT8: 1}  # per number; all others: 2


@dataclass
class OpTotal:
    """Of operations with one name. `num_bytes`: weights, or keys and values, read from memory."""

    calls: int = 0
    seconds: float = 0.0
    num_bytes: int = 0
    num_operations: int = 0  # a multiply-add being two


@dataclass
class StepTotals:
    """Of all steps of one sort."""

    num_steps: int = 0
    ops: dict[str, OpTotal] = field(default_factory=dict)


class OpProfile:
    """Runs lists of operations for a decoder and adds up what they take.

    Steps in which every sequence has one new token are kept apart from those with prompts.
    """

    def __init__(self, name_of: Callable[[Op], str]) -> None:
        self._name_of = name_of
        self._totals = {"decode": StepTotals(), "prompts": StepTotals()}
        self._current = self._totals["decode"]

    def run(
        self,
        kernels: NativeKernels,
        ops: "ctypes.Array[Op]",
        step: Step,
        first: int = 0,
        last: int | None = None,
    ) -> None:
        """As `kernels.run`; a list without sequences, as the head's, belongs to the last step."""
        seconds = np.zeros(len(ops))
        step.op_seconds = seconds.ctypes.data
        kernels.run(ops, step, first, last)
        step.op_seconds = None
        if step.num_sequences and first == 0:
            is_decode = step.num_tokens == step.num_sequences
            self._current = self._totals["decode" if is_decode else "prompts"]
            self._current.num_steps += 1
        seen = [_seen(step, group) for group in range(step.num_groups)]
        for op, taken in zip(ops[first:last], seconds[first:last].tolist(), strict=True):
            total = self._current.ops.setdefault(self._name_of(op), OpTotal())
            total.calls += 1
            total.seconds += taken
            num_bytes, num_operations = _work(kernels, op, step.num_tokens, seen)
            total.num_bytes += num_bytes
            total.num_operations += num_operations

    def totals(self) -> dict[str, Any]:
        """`StepTotals` of "decode" and "prompts", as dicts."""
        return {name: asdict(totals) for name, totals in self._totals.items()}


def _work(
    kernels: NativeKernels, op: Op, num_tokens: int, seen: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    """Bytes that an operation reads from memory, and its arithmetic; norms have none of either."""
    if op.kind == Kind.PRODUCT:
        num_bytes = kernels.packed_bytes(Format(op.format), op.num_outputs, op.num_inputs)
        return num_bytes, 2 * num_tokens * op.num_outputs * op.num_inputs
    if op.kind != Kind.ATTENTION:
        return 0, 0
    num_keys, num_pairs = seen[op.group]
    item = _CACHE_BYTES.get(Format(op.cache_format), 2)
    return (
        2 * num_keys * op.num_kv_heads * op.head_dim * item,
        4 * num_pairs * op.num_heads * op.head_dim,
    )


def _seen(step: Step, group: int) -> tuple[int, int]:
    """Keys that the queries of a step see, and pairs of a query and a key that it sees."""
    contexts = _array(step.context_lens, step.num_sequences)
    num_queries = np.diff(_array(step.query_starts, step.num_sequences + 1))
    window = step.groups[group].window or int(contexts.max())
    num_keys = np.minimum(contexts, window + num_queries - 1).sum()
    num_pairs = sum(
        int(np.minimum(np.arange(context - queries, context) + 1, window).sum())
        for context, queries in zip(contexts.tolist(), num_queries.tolist(), strict=True)
    )
    return int(num_keys), num_pairs


def _array(address: int, length: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_int64 * length).from_address(address))
