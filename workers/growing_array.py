"""An array that grows at its end, for tokens, counts and slots of one choice."""

from collections.abc import Sequence

import numpy as np


class GrowingArray:
    """An int64 array that can be appended to; capacity doubles."""

    def __init__(self, values: np.ndarray) -> None:
        self._data = values.astype(np.int64)  # a copy
        self._size = len(values)

    def __len__(self) -> int:
        return self._size

    def view(self) -> np.ndarray:
        """The values, which may be written to; valid until the next `extend`."""
        return self._data[: self._size]

    def extend(self, values: np.ndarray | Sequence[int]) -> None:
        size = self._size + len(values)
        if size > len(self._data):
            grown = np.empty(max(size, 2 * len(self._data)), dtype=np.int64)
            grown[: self._size] = self.view()
            self._data = grown
        self._data[self._size : size] = values
        self._size = size
