"""What a step's attention reads and writes, worked out once per step and group of layers.

The pages of a layer, [num_blocks, 2, block_size, num_kv_heads, head_dim], are addressed as rows of
one token's K or V: row = block * 2 * block_size + offset for K, `block_size` more for V. The K row
of a token is its *slot*. Block 0, the null block, holds zeros: padding points at it, so slots that
no token of a request fills are never read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

_TILE_QUERIES = 256  # query rows attended at once in a prefill chunk
_MIN_TILE_QUERIES = 16
_MAX_MASK_ELEMENTS = 1 << 22
_MAX_BUCKET_BYTES = 16 << 20  # K and V gathered at once for a bucket of decode rows
_SHORT_CONTEXT = 64  # tokens; below this, padding costs less than another call


@dataclass(slots=True)
class SequenceSlots:
    """Slots of one sequence's tokens, of which the last `num_queries` are computed now."""

    slots: np.ndarray  # [num_tokens] int64
    num_queries: int
    address: int = 0  # of the first slot's memory, where the maker knows it

    def __post_init__(self) -> None:
        if not self.address:
            self.address = self.slots.__array_interface__["data"][0]


@dataclass(frozen=True)
class DecodeRows:
    """Flat rows `start` to `end`: newest tokens of as many sequences, padded to `length` tokens."""

    start: int
    end: int
    length: int
    gather_rows: torch.Tensor  # [2 * (end - start) * length] int64: all K rows, then all V rows
    mask: torch.Tensor | None  # [end - start, 1, 1, length]: 0, -inf for padding; None: no padding


@dataclass(frozen=True)
class PrefillChunk:
    """Flat rows `start` to `end`: tokens of one sequence, which see `length` of its tokens."""

    start: int
    end: int
    length: int
    gather_rows: torch.Tensor  # [2 * length] int64: all K rows, then all V rows
    tiles: tuple[tuple[int, int, int, int], ...]  # query rows from, to; seen tokens from, to


@dataclass(frozen=True)
class AttentionMetadata:
    """A step's attention for one group of layers.

    `corner_mask` serves every tile of every chunk: visibility depends only on the distance between
    query and key, so the mask of a tile is the lower right corner of one big mask.
    """

    write_rows: torch.Tensor  # [2 * num_tokens] int64: K row and V row of each token in turn
    decodes: tuple[DecodeRows, ...]
    prefills: tuple[PrefillChunk, ...]
    corner_mask: torch.Tensor | None  # [tile rows, widest tile]: 0 or -inf
    scratch: torch.Tensor  # [rows, num_kv_heads * head_dim]: where K and V are gathered


class AttentionPlanner:
    """Makes each step's metadata for one group of layers; owns the scratch memory they share."""

    def __init__(
        self,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        window: int | None = None,
    ) -> None:
        """`window`: how many tokens a query sees, itself included; None for all."""
        self.block_size = block_size
        self.window = window
        self.dtype = dtype
        self._row_size = num_kv_heads * head_dim
        self._max_bucket_rows = max(1, _MAX_BUCKET_BYTES // (self._row_size * dtype.itemsize))
        self._scratch = torch.empty(0, self._row_size, dtype=dtype)

    def plan(self, sequences: Sequence[SequenceSlots]) -> AttentionMetadata:
        """`sequences` in flat-batch order: those with one query first, by falling length."""
        new = [sequence.slots[-sequence.num_queries :] for sequence in sequences]
        slots = np.concatenate(new)
        writes = np.stack((slots, slots + self.block_size), axis=1).reshape(-1)
        num_decodes = 0
        while num_decodes < len(sequences) and sequences[num_decodes].num_queries == 1:
            num_decodes += 1
        decodes = self._plan_decodes([self._visible(s) for s in sequences[:num_decodes]])
        prefills, start = [], num_decodes
        for sequence in sequences[num_decodes:]:
            prefills.append(self._plan_prefill(sequence, start))
            start += sequence.num_queries
        gathers = [rows.gather_rows for rows in decodes] + [c.gather_rows for c in prefills]
        self._reserve(max(len(rows) for rows in gathers))
        return AttentionMetadata(
            write_rows=torch.from_numpy(writes),
            decodes=tuple(decodes),
            prefills=tuple(prefills),
            corner_mask=self._corner_mask(prefills),
            scratch=self._scratch,
        )

    def _visible(self, sequence: SequenceSlots) -> np.ndarray:
        """Slots that at least one query of the sequence sees, oldest first."""
        if self.window is None:
            return sequence.slots
        return sequence.slots[-(self.window + sequence.num_queries - 1) :]

    def _reserve(self, num_rows: int) -> None:
        if num_rows > self._scratch.shape[0]:
            self._scratch = torch.empty(num_rows, self._row_size, dtype=self.dtype)

    def _plan_decodes(self, visible: list[np.ndarray]) -> list[DecodeRows]:
        buckets, start = [], 0
        while start < len(visible):
            length = len(visible[start])
            most = max(1, self._max_bucket_rows // (2 * length))
            shortest = 0 if length <= _SHORT_CONTEXT else length // 2
            end = start + 1
            while end < len(visible) and end - start < most and len(visible[end]) >= shortest:
                end += 1
            buckets.append(self._decode_rows(visible[start:end], start, length))
            start = end
        return buckets

    def _decode_rows(self, visible: list[np.ndarray], start: int, length: int) -> DecodeRows:
        rows = np.zeros((2, len(visible), length), dtype=np.int64)
        for i, slots in enumerate(visible):
            rows[0, i, : len(slots)] = slots
        np.add(rows[0], self.block_size, out=rows[1])
        mask = None
        if len(visible[-1]) < length:
            lengths = torch.tensor([len(slots) for slots in visible])
            padding = torch.arange(length) >= lengths[:, None]
            mask = torch.zeros(len(visible), length, dtype=self.dtype)
            mask = mask.masked_fill_(padding, -torch.inf)[:, None, None, :]
        gather = torch.from_numpy(rows.reshape(-1))
        return DecodeRows(start, start + len(visible), length, gather, mask)

    def _plan_prefill(self, sequence: SequenceSlots, start: int) -> PrefillChunk:
        visible = self._visible(sequence)
        length, num_queries = len(visible), sequence.num_queries
        tile_queries = min(_TILE_QUERIES, max(_MIN_TILE_QUERIES, _MAX_MASK_ELEMENTS // length))
        tiles = []
        for low in range(0, num_queries, tile_queries):
            high = min(num_queries, low + tile_queries)
            seen_to = length - num_queries + high
            seen_from = (
                0 if self.window is None else max(0, seen_to - (high - low) - self.window + 1)
            )
            tiles.append((low, high, seen_from, seen_to))
        gather = torch.from_numpy(np.concatenate((visible, visible + self.block_size)))
        return PrefillChunk(start, start + num_queries, length, gather, tuple(tiles))

    def _corner_mask(self, prefills: list[PrefillChunk]) -> torch.Tensor | None:
        tiles = [tile for chunk in prefills for tile in chunk.tiles]
        if not tiles:
            return None
        height = max(high - low for low, high, _, _ in tiles)
        width = max(seen_to - seen_from for _, _, seen_from, seen_to in tiles)
        # Row i from the bottom sees column j from the right exactly when 0 <= j - i < window.
        rows = torch.arange(height - 1, -1, -1)[:, None]
        columns = torch.arange(width - 1, -1, -1)[None, :]
        hidden = columns < rows
        if self.window is not None:
            hidden |= columns - rows >= self.window
        return torch.zeros(height, width, dtype=self.dtype).masked_fill_(hidden, -torch.inf)


def block_slots(block_ids: Sequence[int], block_size: int) -> np.ndarray:
    """Slots of all positions of these blocks in order: [len(block_ids) * block_size] int64."""
    first = np.asarray(block_ids, dtype=np.int64) * (2 * block_size)
    return (first[:, None] + np.arange(block_size, dtype=np.int64)).reshape(-1)
