"""What native attention needs to know of a step's sequences, for one KV group."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.kernels.attention import SequenceSlots


@dataclass(frozen=True)
class NativeMetadata:
    """The kernels read the slots where they lie: they must not move until the step is over."""

    sequences: tuple[SequenceSlots, ...]
    slot_addresses: np.ndarray  # [num_sequences] uint64
    query_starts: np.ndarray  # [num_sequences + 1] int64, flat rows
    context_lens: np.ndarray  # [num_sequences] int64
    window: int | None


class NativePlanner:
    """Makes each step's metadata for one KV group."""

    def __init__(self, window: int | None) -> None:
        """`window`: how many tokens a query sees, itself included; None for all."""
        self.window = window

    def plan(self, sequences: Sequence[SequenceSlots]) -> NativeMetadata:
        """`sequences` in flat-batch order; their slots are contiguous int64."""
        starts = np.zeros(len(sequences) + 1, dtype=np.int64)
        np.cumsum([s.num_queries for s in sequences], out=starts[1:])
        addresses = [s.address for s in sequences]
        return NativeMetadata(
            sequences=tuple(sequences),
            slot_addresses=np.array(addresses, dtype=np.uint64),
            query_starts=starts,
            context_lens=np.array([len(s.slots) for s in sequences], dtype=np.int64),
            window=self.window,
        )
