"""Sums over shards in common memory. Each shard is a thread here, with a thread pool of its own."""

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from headrace.kernels.native import Epilogue, Kind, NativeKernels, Op, Step
from headrace.kernels.native.interface import SHARD_LINE, Format, Shards, open_library
from tests.kernels.native_ops import available_isas

FORMATS = {torch.bfloat16: Format.BF16, torch.float16: Format.F16, torch.float32: Format.F32}

pytestmark = pytest.mark.skipif(not available_isas(), reason="no native kernels on this machine")


class Shard:
    """One of `size` that share `arrivals` and `parts` [areas, size, rows, width]."""

    def __init__(
        self, rank: int, isa: str, arrivals: torch.Tensor, parts: torch.Tensor, num_threads: int
    ) -> None:
        self.kernels = NativeKernels(open_library(), isa, num_threads)
        self.rank, self.parts, self._arrivals = rank, parts, arrivals
        areas, size = parts.shape[:2]
        addresses = [parts[a, r].data_ptr() for a in range(areas) for r in range(size)]
        self._addresses = np.array(addresses, dtype=np.uintp)
        self._meetings = torch.zeros(num_threads * SHARD_LINE, dtype=torch.int32)
        self.shards = Shards(
            rank, size, arrivals.data_ptr(), self._meetings.data_ptr(), self._addresses.ctypes.data
        )

    def op(self, kind: Kind, area: int = 0, epilogue: Epilogue = Epilogue.STORE) -> Op:
        return Op(
            kind=kind, epilogue=epilogue, input=area, output=0,
            num_outputs=self.parts.shape[-1], pages=ctypes.addressof(self.shards),
        )  # fmt: skip

    def sum(self, area: int, out: torch.Tensor, epilogue: Epilogue) -> None:
        step = Step(num_tokens=out.shape[0], format=FORMATS[out.dtype])
        step.buffers[0], step.strides[0] = out.data_ptr(), out.stride(0)
        self.kernels.run((Op * 1)(self.op(Kind.SUM, area, epilogue)), step)


def make_shards(
    size: int, rows: int, width: int, isa: str, num_threads: int = 1, areas: int = 2
) -> list[Shard]:
    arrivals = torch.zeros(size * SHARD_LINE, dtype=torch.int32)
    parts = torch.full((areas, size, rows, width), float("nan"))
    return [Shard(rank, isa, arrivals, parts, num_threads) for rank in range(size)]


def together(shards: list[Shard], work: Callable[[Shard], None]) -> None:
    with ThreadPoolExecutor(len(shards)) as pool:
        list(pool.map(work, shards))


def sum_all(shards: list[Shard], area: int, outs: list[torch.Tensor], epilogue: Epilogue) -> None:
    together(shards, lambda shard: shard.sum(area, outs[shard.rank], epilogue))


def in_order(parts: torch.Tensor, before: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return (total if before is None else before.float() + total).to(dtype)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("dtype", FORMATS)
def test_sums_in_order_of_ranks(isa: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for size, width, rows in ((2, 64, 2), (3, 67, 1), (4, 15, 64), (3, 576, 64), (2, 1, 1)):
        shards = make_shards(size, rows, width, isa, num_threads=1 + width % 2)
        parts = shards[0].parts
        parts[0] = torch.randn(parts[0].shape, generator=generator)
        before = torch.randn(rows, width, generator=generator).to(dtype)
        for epilogue in (Epilogue.STORE, Epilogue.ADD):
            # A frame of NaN: nothing beside the rows is written.
            outs = [torch.full((rows + 1, width + 3), float("nan"), dtype=dtype) for _ in shards]
            for out in outs:
                out[:rows, :width] = before
            sum_all(shards, 0, [out[:rows, :width] for out in outs], epilogue)
            added = before if epilogue is Epilogue.ADD else None
            for out in outs:
                assert torch.equal(out[:rows, :width], in_order(parts[0], added, dtype))
                assert out[rows].isnan().all() and out[:, width:].isnan().all()


@pytest.mark.parametrize("size", [3, 4])
def test_a_row_alone_and_among_64(size: int) -> None:
    isa, width = available_isas()[-1], 577
    shards = make_shards(size, 64, width, isa)
    parts = shards[0].parts
    parts[0] = torch.randn(parts[0].shape, generator=torch.Generator().manual_seed(1))
    many = [torch.zeros(64, width) for _ in shards]
    sum_all(shards, 0, many, Epilogue.STORE)
    for row in (0, 1, 63):
        parts[1, :, 0] = parts[0, :, row]
        alone = [torch.zeros(1, width) for _ in shards]
        sum_all(shards, 1, alone, Epilogue.STORE)
        for rank in range(size):
            assert torch.equal(alone[rank][0], many[rank][row])


def test_areas_in_turn_never_mix() -> None:
    """Shards that run at different speeds read what belongs to the same round."""
    isa = available_isas()[-1]
    shards = make_shards(3, 1, 64, isa)

    def work(shard: Shard) -> None:
        out = torch.zeros(1, 64)
        for number in range(300):
            area = number % 2
            shard.parts[area, shard.rank] = float(number * (shard.rank + 1))
            if number % (5 + shard.rank) == 0:
                torch.zeros(20_000).sum()  # some are late
            shard.sum(area, out, Epilogue.STORE)
            assert (out == number * 6.0).all(), (shard.rank, number)

    together(shards, work)


def test_what_is_written_before_a_meeting_is_read_after_it() -> None:
    shards = make_shards(2, 1, 1, available_isas()[-1])
    common = torch.zeros(1)

    def work(shard: Shard) -> None:
        meet = (Op * 1)(shard.op(Kind.MEET))
        for number in range(200):
            if shard.rank == 0:
                common[0] = number
            shard.kernels.run(meet, Step())
            assert common[0] == number
            shard.kernels.run(meet, Step())

    together(shards, work)
