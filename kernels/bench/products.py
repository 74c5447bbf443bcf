"""Products with packed matrices of any format."""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
from torch.nn import functional

from headrace.kernels.bench.cases import (
    COLD_BYTES,
    FILLER,
    Case,
    Kernel,
    make_step,
    must_be_close,
    must_be_equal,
    run_op,
)
from headrace.kernels.bench.machine import Call
from headrace.kernels.bench.shapes import Matrix, ModelShape
from headrace.kernels.dequantize import StoredMatrix
from headrace.kernels.native import (
    FORMATS,
    Epilogue,
    Format,
    Kind,
    NativeKernels,
    Op,
    PackedMatrix,
    Step,
)

_ALIGNMENT = 64
_FEW_ROWS = 64  # from here on arithmetic is the limit, and fewer matrices are enough
_MANY_ROWS_BYTES = 16 << 20
_MOST_BLOCK_INPUTS = 256
_GATED = (Epilogue.SILU_MUL, Epilogue.GELU_MUL)

# Inputs and bytes of a block of a GGUF file, and where its float16 numbers lie.
_BLOCKS: Mapping[Format, tuple[int, int, tuple[int, ...]]] = MappingProxyType(
    {
        Format.Q8_0: (32, 34, (0,)),
        Format.Q4_0: (32, 18, (0,)),
        Format.Q4_1: (32, 20, (0, 2)),
        Format.Q5_0: (32, 22, (0,)),
        Format.Q5_1: (32, 24, (0, 2)),
        Format.Q4_K: (256, 144, (0, 2)),
        Format.Q5_K: (256, 176, (0, 2)),
        Format.Q6_K: (256, 210, (208,)),
    }
)


def supported_formats(kernels: NativeKernels) -> tuple[Format, ...]:
    """What matrices can be packed as and multiplied with."""
    return tuple(format for format in Format if _can_pack(kernels, format, _MOST_BLOCK_INPUTS))


def product_kernels(
    kernels: NativeKernels,
    formats: Sequence[Format],
    shapes: Sequence[ModelShape],
    rows: Sequence[int],
    compares_torch: bool,
) -> Iterator[Kernel]:
    """One for each format; formats are supported ones."""
    for format in formats:
        product = _Product(kernels, format, tuple(shapes), tuple(rows), compares_torch)
        yield Kernel(f"product {format.name}", product.check, product.cases)


class _Product:
    """Rows are in the format of a float matrix, and in bfloat16 for all others."""

    def __init__(
        self,
        kernels: NativeKernels,
        format: Format,
        shapes: tuple[ModelShape, ...],
        rows: tuple[int, ...],
        compares_torch: bool,
    ) -> None:
        self._kernels = kernels
        self._format = format
        self._shapes = shapes
        self._rows = rows
        self._compares_torch = compares_torch
        self._dtype = _dtype_of(format)

    def check(self) -> None:
        """Near the exact product of what the matrix holds; a row's bits need no other rows."""
        num_rows, num_outputs, num_inputs = 70, 96, 512
        generator = torch.Generator().manual_seed(0)
        x = torch.randn((num_rows, num_inputs), generator=generator).to(self._dtype)
        for epilogue in {matrix.epilogue for matrix in self._shapes[0].matrices()}:
            is_gated = epilogue in _GATED
            packed, weight = self._random_matrix(num_outputs, num_inputs, is_gated)
            sums = _as_multiplied(x, self._format) @ weight.T
            expected = _silu_mul(sums) if is_gated else sums
            tolerance = 1e-4 * num_inputs**0.5 * weight.std().item()
            if epilogue is not Epilogue.STORE_F32:
                tolerance += torch.finfo(self._dtype).eps * expected.abs().max().item()
            result = self._multiply(x, packed, epilogue)
            must_be_close(result, expected, tolerance)
            for count in (1, 8):
                few = self._multiply(x[:count], packed, epilogue)
                must_be_equal(few, result[:count], f"{count} of {num_rows} rows alone")

    def cases(self) -> Iterator[Case]:
        for shape in self._shapes:
            for matrix in shape.matrices():
                if _can_pack(self._kernels, self._format, matrix.num_inputs):
                    yield from self._matrix_cases(shape.name, matrix)

    def _matrix_cases(self, model: str, matrix: Matrix) -> Iterator[Case]:
        num_bytes = self._kernels.packed_bytes(self._format, matrix.num_outputs, matrix.num_inputs)
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        memory = torch.full((max(1, COLD_BYTES // size), size), FILLER, dtype=torch.uint8)
        weights = None
        if self._compares_torch:
            elements = matrix.num_outputs * matrix.num_inputs
            count = max(1, COLD_BYTES // (elements * self._dtype.itemsize))
            weights = torch.full(
                (count, matrix.num_outputs, matrix.num_inputs), 0.01, dtype=self._dtype
            )
        for num_rows in self._rows:
            num_matrices = len(memory)
            if num_rows >= _FEW_ROWS:
                num_matrices = max(1, min(num_matrices, _MANY_ROWS_BYTES // size))
            x = torch.ones(num_rows, matrix.num_inputs, dtype=self._dtype)
            ops, step, buffers = self._make_step(matrix, memory[:num_matrices], x)
            yield Case(
                model=model,
                shape=f"{matrix.name} {matrix.num_outputs}x{matrix.num_inputs}",
                num_rows=num_rows,
                call=_runner(self._kernels, ops, step, buffers),
                num_kernels=num_matrices,
                num_bytes=num_bytes,
                num_operations=2 * num_rows * matrix.num_outputs * matrix.num_inputs,
                format=self._format,
                torch_call=None if weights is None else _torch_runner(x, weights, num_matrices),
            )

    def _make_step(
        self, matrix: Matrix, memory: torch.Tensor, x: torch.Tensor
    ) -> tuple["ctypes.Array[Op]", Step, tuple[torch.Tensor, ...]]:
        """A product of the rows with every matrix in `memory`."""
        dtype = torch.float32 if matrix.epilogue is Epilogue.STORE_F32 else x.dtype
        width = matrix.num_outputs // (2 if matrix.epilogue in _GATED else 1)
        out = torch.zeros(x.shape[0], width, dtype=dtype)
        ops = (Op * len(memory))()
        for op, weight in zip(ops, memory, strict=True):
            op.kind, op.epilogue, op.input, op.output = Kind.PRODUCT, matrix.epilogue, 0, 1
            op.weight, op.format = weight.data_ptr(), self._format
            op.num_outputs, op.num_inputs = matrix.num_outputs, matrix.num_inputs
        return ops, make_step((x, out)), (memory, x, out)

    def _multiply(self, x: torch.Tensor, packed: PackedMatrix, epilogue: Epilogue) -> torch.Tensor:
        """In memory that was NaN, or 0 where the product is added to it."""
        width = packed.num_outputs // (2 if packed.is_gated else 1)
        dtype = torch.float32 if epilogue is Epilogue.STORE_F32 else x.dtype
        before = 0.0 if epilogue is Epilogue.ADD else torch.nan
        out = torch.full((x.shape[0], width), before, dtype=dtype)
        op = Op(
            kind=Kind.PRODUCT, epilogue=epilogue, input=0, output=1,
            weight=packed.data.data_ptr(), num_outputs=packed.num_outputs,
            num_inputs=packed.num_inputs, format=packed.format,
        )  # fmt: skip
        run_op(self._kernels, op, (x, out))
        return out

    def _random_matrix(
        self, num_outputs: int, num_inputs: int, is_gated: bool
    ) -> tuple[PackedMatrix, torch.Tensor]:
        """A packed matrix and what it holds, in float64."""
        num_bytes = self._kernels.packed_bytes(self._format, num_outputs, num_inputs)
        memory = torch.zeros(num_bytes, dtype=torch.uint8)
        packed = PackedMatrix(
            memory, self._format, num_outputs, num_inputs, self._kernels, is_gated
        )
        num_parts = 2 if is_gated else 1
        weights = []
        for part in range(num_parts):
            shape = (num_outputs // num_parts, num_inputs)
            rows, weight = _random_rows(self._format, shape, seed=part)
            packed.fill(rows, part * shape[0])
            weights.append(weight)
        return packed, torch.cat(weights)


def _can_pack(kernels: NativeKernels, format: Format, num_inputs: int) -> bool:
    try:
        return kernels.packed_bytes(format, 1, num_inputs) > 0
    except ValueError:
        return False


def _dtype_of(format: Format) -> torch.dtype:
    """Of the rows that a matrix in this format is multiplied with."""
    dtypes = {known: dtype for dtype, known in FORMATS.items()}
    return dtypes.get(format, torch.bfloat16)


def _random_rows(
    format: Format, shape: tuple[int, int], seed: int
) -> tuple[torch.Tensor | StoredMatrix, torch.Tensor]:
    """Rows to pack, and in float64 what the packed matrix holds then."""
    if format in _BLOCKS:
        stored = _random_blocks(format, shape, seed)
        return stored, stored.dequantized(torch.float32).double()
    generator = torch.Generator().manual_seed(seed + 1)
    rows = torch.randn(shape, generator=generator).to(_dtype_of(format))
    if format is Format.INT8:
        scales = rows.float().abs().amax(dim=1, keepdim=True) / 127
        return rows, (rows.float() / scales).round().double() * scales.double()
    return rows, rows.double()


def _random_blocks(format: Format, shape: tuple[int, int], seed: int) -> StoredMatrix:
    """Any codes and sub-scales; float16 numbers of a size that is common."""
    block_inputs, block_bytes, places = _BLOCKS[format]
    rng = np.random.default_rng(seed)
    num_rows, num_inputs = shape
    blocks = rng.integers(0, 256, (num_rows, num_inputs // block_inputs, block_bytes), np.uint8)
    for place in places:
        numbers = rng.normal(0.0, 0.01, blocks.shape[:2]).astype(np.float16)
        blocks[:, :, place : place + 2] = numbers[:, :, None].view(np.uint8)
    return StoredMatrix(format.name, shape, blocks.reshape(num_rows, -1))


def _as_multiplied(x: torch.Tensor, format: Format) -> torch.Tensor:
    """`x` in float64; with quantized matrices as it is quantized, in blocks of 32 inputs."""
    if format in FORMATS.values():
        return x.double()
    blocks = x.float().unflatten(1, (-1, 32))
    largest = blocks.abs().amax(dim=2, keepdim=True)
    # A number over a tensor would be that times its reciprocal, which is rounded once more.
    codes = (blocks * (torch.full_like(largest, 127.0) / largest)).round()
    scales = largest / torch.full_like(largest, 127.0)
    return (codes.double() * scales.double()).flatten(1)


def _silu_mul(sums: torch.Tensor) -> torch.Tensor:
    gate, up = sums.chunk(2, dim=1)
    return functional.silu(gate) * up


def _runner(
    kernels: NativeKernels, ops: "ctypes.Array[Op]", step: Step, operands: Sequence[torch.Tensor]
) -> Call:
    def run() -> Sequence[torch.Tensor]:
        kernels.run(ops, step)
        return operands  # which live as long as this function

    return run


def _torch_runner(x: torch.Tensor, weights: torch.Tensor, num_products: int) -> Call:
    def run() -> None:
        with torch.inference_mode():
            for number in range(num_products):
                functional.linear(x, weights[number % len(weights)])

    return run
