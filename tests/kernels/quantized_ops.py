"""Quantized matrices for tests: random blocks, packing and products, and a scalar model of them.

The model follows the rule at the top of `kernels/native/quantized.h` in numpy.
"""

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from headrace.configs.model_files.gguf import BLOCK_SIZES
from headrace.kernels.dequantize import dequantize
from headrace.kernels.native import Epilogue, Kind, Lanes, Op, Step
from headrace.kernels.native.interface import Format, open_library

ROW_FORMATS = {
    torch.bfloat16: Format.BF16,
    torch.float16: Format.F16,
    torch.float32: Format.F32,
}
FILE_FORMATS = tuple(format for format in Format if format > Format.INT8)
QUANTIZED = (Format.INT8, *FILE_FORMATS)
GATED = (Epilogue.SILU_MUL, Epilogue.GELU_MUL)


@dataclass(frozen=True)
class Fields:
    """Byte ranges of a file's block, and the bytes of a code that means 1."""

    scale: int
    codes: slice
    one: int
    minimum: int | None = None
    high: slice = field(default_factory=lambda: slice(0, 0))
    high_one: int = 0
    sub_scales: slice = field(default_factory=lambda: slice(0, 0))


FIELDS = {
    Format.Q8_0: Fields(0, slice(2, 34), 1),
    Format.Q4_0: Fields(0, slice(2, 18), 0x99),
    Format.Q4_1: Fields(0, slice(4, 20), 0x11, 2),
    Format.Q5_0: Fields(0, slice(6, 22), 0x11, None, slice(2, 6), 0xFF),
    Format.Q5_1: Fields(0, slice(8, 24), 0x11, 2, slice(4, 8)),
    Format.Q4_K: Fields(0, slice(16, 144), 0x11, 2, sub_scales=slice(4, 16)),
    Format.Q5_K: Fields(0, slice(48, 176), 0x11, 2, slice(16, 48), sub_scales=slice(4, 16)),
    Format.Q6_K: Fields(208, slice(0, 128), 0x11, None, slice(128, 192), 0xAA, slice(192, 208)),
}


def block_inputs(format: Format) -> int:
    return 1 if format is Format.INT8 else BLOCK_SIZES[format.name][0]


def random_blocks(format: Format, outputs: int, inputs: int, seed: int = 0) -> np.ndarray:
    """Uint8 [outputs, bytes of a row]: any codes and sub-scales, sensible fp16 scales."""
    size, num_bytes = BLOCK_SIZES[format.name]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (outputs, inputs // size, num_bytes), np.uint8)
    for offset in (FIELDS[format].scale, FIELDS[format].minimum):
        if offset is not None:
            scales = rng.normal(0, 0.01, raw.shape[:2]).astype(np.float16)
            raw[:, :, offset : offset + 2] = scales[:, :, None].view(np.uint8)
    return raw.reshape(outputs, -1)


def dequantized(format: Format, raw: np.ndarray) -> np.ndarray:
    """Float32 [outputs, inputs] of uint8 [outputs, bytes of a row]."""
    size, num_bytes = BLOCK_SIZES[format.name]
    shape = (raw.shape[0], raw.shape[1] // num_bytes * size)
    return dequantize(memoryview(raw.tobytes()), format.name, shape, torch.float32).numpy()


class Machine:
    """A library with an instruction set by number and a thread pool."""

    def __init__(self, isa: int, num_threads: int = 2, library: ctypes.CDLL | None = None) -> None:
        self.isa = isa
        self.library = library or open_library()
        self.pool = self.library.hr_pool_new(num_threads, None)
        weakref.finalize(self, self.library.hr_pool_free, self.pool)

    def run(self, ops: Sequence[Op], buffers: Sequence[torch.Tensor], num_tokens: int) -> None:
        step = Step(num_tokens=num_tokens)
        for number, buffer in enumerate(buffers):
            step.buffers[number], step.strides[number] = buffer.data_ptr(), buffer.stride(0)
        array = (Op * len(ops))(*ops)
        assert not self.library.hr_run(self.pool, self.isa, array, len(ops), ctypes.byref(step))


@dataclass(frozen=True)
class Quantized:
    """A packed matrix."""

    machine: Machine
    format: Format
    num_outputs: int
    num_inputs: int
    is_gated: bool = False

    def __post_init__(self) -> None:
        size = self.machine.library.hr_packed_bytes(self.format, self.num_outputs, self.num_inputs)
        data = torch.zeros(size + 64, dtype=torch.uint8)
        offset = -data.data_ptr() % 64
        object.__setattr__(self, "data", data[offset : offset + size])

    def fill(self, rows: np.ndarray | torch.Tensor, first_row: int) -> int:
        """Pack blocks of a file, or floats into INT8; the library's answer."""
        if isinstance(rows, torch.Tensor):
            source, address = ROW_FORMATS[rows.dtype], rows.contiguous().data_ptr()
        else:
            source, address = self.format, np.ascontiguousarray(rows).ctypes.data
        lanes, half = Lanes.PLAIN, self.num_outputs // 2
        if self.is_gated:
            lanes = Lanes.GATE if first_row < half else Lanes.UP
            first_row -= 0 if lanes is Lanes.GATE else half
        machine = self.machine
        answer: int = machine.library.hr_pack(
            machine.pool,
            address,
            source,
            len(rows),
            self.num_inputs,
            self.data.data_ptr(),  # type: ignore[attr-defined]
            self.format,
            first_row,
            lanes,
        )
        return answer

    def lookup(self, ids: Sequence[int], scale: float, dtype: torch.dtype) -> torch.Tensor:
        out = torch.full((len(ids), self.num_inputs), torch.nan, dtype=dtype)
        rows = torch.tensor(ids)
        self.machine.library.hr_lookup(
            self.machine.pool,
            self.data.data_ptr(),  # type: ignore[attr-defined]
            self.format,
            self.num_inputs,
            rows.data_ptr(),
            len(ids),
            scale,
            ROW_FORMATS[dtype],
            out.data_ptr(),
        )
        return out

    def op(self, epilogue: Epilogue = Epilogue.STORE_F32) -> Op:
        return Op(
            kind=Kind.PRODUCT,
            epilogue=epilogue,
            input=0,
            output=1,
            weight=self.data.data_ptr(),  # type: ignore[attr-defined]
            format=self.format,
            num_outputs=self.num_outputs,
            num_inputs=self.num_inputs,
        )

    def product(
        self,
        x: torch.Tensor,
        epilogue: Epilogue = Epilogue.STORE_F32,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The product in fresh memory filled with NaN, whose surplus columns must stay so."""
        width = self.num_outputs // 2 if epilogue in GATED else self.num_outputs
        dtype = torch.float32 if epilogue is Epilogue.STORE_F32 else x.dtype
        out = torch.full((x.shape[0], width + 3), torch.nan, dtype=dtype)
        if residual is not None:
            out[:, :width] = residual
        op = self.op(epilogue)
        op.bias = 0 if bias is None else bias.data_ptr()
        self.machine.run((op,), (x, out), x.shape[0])
        assert out[:, width:].isnan().all()
        return out[:, :width].contiguous()


def packed(
    machine: Machine, format: Format, weight: np.ndarray | torch.Tensor, inputs: int, gated=False
) -> Quantized:
    """A matrix filled in two pieces."""
    matrix = Quantized(machine, format, len(weight), inputs, gated)
    cut = len(weight) // 2 if gated else len(weight) // 3
    assert matrix.fill(weight[:cut], 0) == 0
    assert matrix.fill(weight[cut:], cut) == 0
    return matrix


def random_matrix(
    machine: Machine, format: Format, outputs: int, inputs: int, gated: bool = False, seed: int = 0
) -> tuple[Quantized, np.ndarray]:
    """A packed matrix and what it holds: float32 [outputs, inputs]."""
    if format is Format.INT8:
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn((outputs, inputs), generator=generator)
        codes, scales = int8_rows(weight.numpy())
        return packed(machine, format, weight, inputs, gated), codes * scales[:, None]
    raw = random_blocks(format, outputs, inputs, seed)
    return packed(machine, format, raw, inputs, gated), dequantized(format, raw)


# The model.


def int8_rows(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes float32 [outputs, inputs] and scales float32 [outputs]."""
    scales = np.abs(weight).max(axis=1) / np.float32(127)
    codes = np.rint(weight / np.where(scales == 0, 1, scales)[:, None])
    return codes + np.float32(0), scales  # codes have no -0


def quantized_rows(x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Codes float32 [rows, blocks, 32] and scales float32 [rows, blocks]."""
    values = x.float().numpy()
    values = np.pad(values, ((0, 0), (0, -values.shape[1] % 32))).reshape(len(values), -1, 32)
    is_finite = np.isfinite(values).all(axis=2)
    values = np.where(is_finite[:, :, None], values, 0)
    most = np.abs(values).max(axis=2)
    most = np.where(most < 2.0**-100, np.float32(0), most)
    inverse = np.where(most == 0, 0, np.float32(127) / np.where(most == 0, 1, most))
    codes = np.rint(values * inverse[:, :, None].astype(np.float32))
    return codes, np.where(is_finite, most / np.float32(127), np.float32(np.nan))


def _flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 2.0**-126, np.copysign(0, x), x).astype(np.float32)


def _fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """fma of float32 with one rounding: in float64 to odd, then to float32."""
    product = a.astype(np.float64) * b  # exact
    c = np.broadcast_to(c, product.shape).astype(np.float64)
    total = product + c
    part = total - c
    error = (product - part) + (c - (total - part))
    bits = total.view(np.int64)
    is_even = (error != 0) & (bits & 1 == 0) & np.isfinite(total)
    toward = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return _flushed(np.where(is_even, toward, total).astype(np.float32))


def _probe(format: Format, raw: np.ndarray, what: str) -> np.ndarray:
    """Codes less their offset, scales or minima of every element, by dequantizing blocks in which
    everything else is 1 or 0.
    """
    fields = FIELDS[format]
    blocks = raw.reshape(-1, BLOCK_SIZES[format.name][1]).copy()
    one = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    if what != "scales":
        blocks[:, fields.scale : fields.scale + 2] = one
    if fields.minimum is not None and what != "minima":
        blocks[:, fields.minimum : fields.minimum + 2] = 0
    if what == "codes":
        ones = np.full(16, 1) if format is Format.Q6_K else [1] * 4 + [0] * 4 + [1] * 4
        blocks[:, fields.sub_scales] = ones if fields.sub_scales.stop else []
    else:
        is_one = what == "scales"
        blocks[:, fields.codes] = fields.one if is_one else 0
        blocks[:, fields.high] = fields.high_one if is_one else 0
    return dequantized(format, blocks.reshape(raw.shape))


@np.errstate(over="ignore", invalid="ignore")
def modelled_product(x: torch.Tensor, format: Format, weight: np.ndarray) -> np.ndarray:
    """Float32 [rows, outputs]; `weight` are a file's blocks, or floats for INT8."""
    codes, scales = quantized_rows(x)
    totals = np.zeros((len(codes), len(weight)), np.float32)
    part = 16 if format is Format.Q6_K else 32
    if format is Format.INT8:
        weights, row_scales = int8_rows(weight)
        weights = np.pad(weights, ((0, 0), (0, -weights.shape[1] % 32)))
        weight_scales, minima = np.ones_like(weights), np.zeros_like(weights)
    else:
        weights, weight_scales, minima = (
            _probe(format, weight, what) for what in ("codes", "scales", "minima")
        )
    for n in range(codes.shape[1]):
        scale = scales[:, n, None]
        for start in range(0, 32, part):
            at = slice(32 * n + start, 32 * n + start + part)
            dots = codes[:, n, start : start + part].astype(np.float64) @ weights[:, at].T
            both = _flushed(scale * weight_scales[None, :, at.start])
            totals = _fused(both, dots.astype(np.float32), totals)
        if format is not Format.INT8 and FIELDS[format].minimum is not None:
            scaled = _flushed(scale * codes[:, n].sum(axis=1, keepdims=True))
            totals = _fused(minima[None, :, 32 * n], scaled, totals)
    return _flushed(totals * row_scales) if format is Format.INT8 else totals
