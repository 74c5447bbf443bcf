"""What pipeline stages hand on: the residual stream forwards, sampled tokens backwards."""

from collections import deque

import torch
import torch.distributed as dist

from headrace.workers.distributed.place import Place

_RESIDUAL, _TOKENS = 0, 1  # tags


class StageLinks:
    """A worker's links to those with its shard in other stages, over torch's default group.

    Sending does not wait: a sent tensor is kept until the other end has it.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._last = place.rank_in_stage(place.pipeline_parallel_size - 1)
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def send_residual(self, residual: torch.Tensor) -> None:
        """To the next stage: [num_tokens, hidden_size]. The tensor must not change afterwards."""
        self._send(residual, self._place.rank_in_stage(self._place.stage + 1), _RESIDUAL)

    def receive_residual(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """From the stage before."""
        residual = torch.empty(shape, dtype=dtype)
        dist.recv(residual, self._place.rank_in_stage(self._place.stage - 1), tag=_RESIDUAL)
        return residual

    def send_tokens(self, token_ids: torch.Tensor) -> None:
        """From the last stage to all others: [num_sampled] int64."""
        for stage in range(self._place.pipeline_parallel_size - 1):
            self._send(token_ids, self._place.rank_in_stage(stage), _TOKENS)

    def receive_tokens(self, num_sampled: int) -> torch.Tensor:
        """From the last stage, of the oldest step whose tokens were not received."""
        token_ids = torch.empty(num_sampled, dtype=torch.int64)
        dist.recv(token_ids, self._last, tag=_TOKENS)
        return token_ids

    def _send(self, tensor: torch.Tensor, rank: int, tag: int) -> None:
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        tensor = tensor.contiguous()
        work = dist.isend(tensor, rank, tag=tag)
        assert work is not None
        self._sent.append((work, tensor))
