"""An array that grows at its end, for tokens, counts and slots of one choice."""

from collections.abc import Sequence

import numpy as np


class GrowingArray:
    """An int64 array that can be appended to; capacity doubles.

    Single values are read and appended without a view: one per choice and step, that counts.
    """

    __slots__ = ("_data", "_size", "address")

    def __init__(self, values: np.ndarray) -> None:
        self._hold(values.astype(np.int64))  # a copy
        self._size = len(values)

    def _hold(self, data: np.ndarray) -> None:
        self._data = data
        # Of the first value's memory; valid until the next `append` or `extend`.
        self.address: int = data.__array_interface__["data"][0]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        """One value, 0 <= index < len; not checked."""
        return int(self._data[index])

    def append(self, value: int) -> None:
        if self._size == len(self._data):
            self._grow(self._size + 1)
        self._data[self._size] = value
        self._size += 1

    def view(self) -> np.ndarray:
        """The values, which may be written to; valid until the next `extend`."""
        return self._data[: self._size]

    def extend(self, values: np.ndarray | Sequence[int]) -> None:
        size = self._size + len(values)
        if size > len(self._data):
            self._grow(size)
        self._data[self._size : size] = values
        self._size = size

    def _grow(self, size: int) -> None:
        grown = np.empty(max(size, 2 * len(self._data)), dtype=np.int64)
        grown[: self._size] = self.view()
        self._hold(grown)
