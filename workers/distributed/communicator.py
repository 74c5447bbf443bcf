"""Collectives of a few workers: one interface, whatever carries them."""

from collections.abc import Sequence
from typing import Protocol

import torch


class Communicator(Protocol):
    """What the workers of a group do together. All of them make the same calls in the same order.

    Sums are in the order of ranks, in float32 (or in the tensor's own type, if it is of integers),
    so that a row's result depends neither on the tensor's size nor on the number of rows.
    """

    rank: int  # in the group
    size: int

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, of the tensor's type, in a tensor of its own."""

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, by rank; all have one shape and type."""

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sum: the first axis is cut into `size` equal parts."""

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite the tensor with that of rank `source`."""

    def barrier(self) -> None:
        """Wait until all ranks are here."""


class Alone:
    """A group of one."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor]

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        pass

    def barrier(self) -> None:
        pass


ALONE: Communicator = Alone()


def sum_in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of tensors, one after the other, with one rounding to their type at the end."""
    first = parts[0]
    wide = torch.float32 if first.is_floating_point() else first.dtype
    total = first.to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(first.dtype)
