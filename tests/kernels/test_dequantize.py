"""Dequantizers against those of the `gguf` package, on random block bytes."""

import gguf
import numpy as np
import pytest
import torch

from headrace.configs.errors import ModelFileError
from headrace.configs.model_files.gguf import BLOCK_SIZES
from headrace.configs.model_files.gguf_config import SUPPORTED_TENSOR_TYPES
from headrace.kernels.dequantize import SUPPORTED_TYPES, dequantize
from headrace.kernels.dequantize.reference import CHUNK_ELEMENTS

QUANTIZED = [name for name in SUPPORTED_TYPES if BLOCK_SIZES[name][0] > 1]
# Byte offset of each fp16 scale in a block.
SCALES = {
    "Q8_0": [0],
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}


def random_blocks(type_name: str, num_blocks: int, *, finite: bool) -> np.ndarray:
    rng = np.random.default_rng(num_blocks)
    raw = rng.integers(0, 256, (num_blocks, BLOCK_SIZES[type_name][1]), dtype=np.uint8)
    for offset in SCALES.get(type_name, []) if finite else []:
        scales = rng.normal(0, 0.1, num_blocks).astype(np.float16)
        raw[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    return raw


def expected_values(raw: np.ndarray, type_name: str) -> np.ndarray:
    kind = gguf.GGMLQuantizationType[type_name]
    with np.errstate(all="ignore"):  # arbitrary bytes hold infinite scales
        return gguf.quants.dequantize(raw, kind).astype(np.float32).reshape(-1)


def assert_same_bits(ours: torch.Tensor, theirs: np.ndarray) -> None:
    """Bitwise equal, signs of zero included; NaN equals NaN of any payload."""
    left, right = ours.numpy().reshape(-1), theirs.reshape(-1)
    nan = np.isnan(right)
    assert np.array_equal(np.isnan(left), nan)
    left, right = np.ascontiguousarray(left[~nan]), np.ascontiguousarray(right[~nan])
    assert np.array_equal(left.view(np.uint32), right.view(np.uint32))


def test_supported_types_are_those_of_the_file_parser() -> None:
    assert sorted(SUPPORTED_TYPES) == sorted(SUPPORTED_TENSOR_TYPES)


def test_block_sizes_are_those_of_the_format() -> None:
    for name, sizes in BLOCK_SIZES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == sizes, name


@pytest.mark.parametrize("finite", [True, False], ids=["finite-scales", "any-bytes"])
@pytest.mark.parametrize("num_blocks", [1, 3, 100])
@pytest.mark.parametrize("type_name", QUANTIZED)
def test_blocks_equal_the_gguf_package_bitwise(
    type_name: str, num_blocks: int, finite: bool
) -> None:
    raw = random_blocks(type_name, num_blocks, finite=finite)
    shape = (num_blocks, BLOCK_SIZES[type_name][0])
    values = dequantize(memoryview(raw.tobytes()), type_name, shape, torch.float32)
    assert values.shape == shape
    assert_same_bits(values, expected_values(raw, type_name))


@pytest.mark.parametrize("type_name", QUANTIZED)
def test_tensors_longer_than_a_chunk(type_name: str) -> None:
    block_elements = BLOCK_SIZES[type_name][0]
    num_blocks = CHUNK_ELEMENTS // block_elements + 3
    raw = random_blocks(type_name, num_blocks, finite=True)
    values = dequantize(
        memoryview(raw.tobytes()), type_name, (num_blocks * block_elements,), torch.float32
    )
    assert_same_bits(values, expected_values(raw, type_name))


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("count", [1, 63, CHUNK_ELEMENTS + 5])
def test_floats_equal_the_gguf_package(type_name: str, count: int) -> None:
    raw = random_blocks(type_name, count, finite=False).reshape(-1)
    values = dequantize(memoryview(raw.tobytes()), type_name, (count,), torch.float32)
    kind = {"F32": np.float32, "F16": np.float16}.get(type_name)
    if kind is None:
        expected = expected_values(raw, type_name)
    else:
        with np.errstate(all="ignore"):
            expected = raw.view(kind).astype(np.float32)
    assert_same_bits(values, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("type_name", SUPPORTED_TYPES)
def test_other_dtypes_are_the_rounded_fp32_values(type_name: str, dtype: torch.dtype) -> None:
    block_elements = BLOCK_SIZES[type_name][0]
    raw = random_blocks(type_name, 64, finite=True)
    data = memoryview(raw.tobytes())
    full = dequantize(data, type_name, (64, block_elements), torch.float32)
    rounded = dequantize(data, type_name, (64, block_elements), dtype)
    assert rounded.dtype == dtype
    assert torch.equal(rounded.nan_to_num(nan=-1.0), full.to(dtype).nan_to_num(nan=-1.0))


def test_takes_tensors_as_well_as_views() -> None:
    raw = random_blocks("Q4_K", 4, finite=True)
    from_view = dequantize(memoryview(raw.tobytes()), "Q4_K", (2, 512), torch.float32)
    from_tensor = dequantize(
        torch.from_numpy(raw.reshape(-1).copy()), "Q4_K", (2, 512), torch.float32
    )
    assert torch.equal(from_view, from_tensor)


def test_result_does_not_share_memory_with_the_input() -> None:
    data = torch.zeros(16, dtype=torch.uint8)
    values = dequantize(data, "F32", (4,), torch.float32)
    data.fill_(255)
    assert torch.equal(values, torch.zeros(4))


@pytest.mark.parametrize(
    ("type_name", "shape", "num_bytes", "words"),
    [
        ("Q2_K", (256,), 84, "not supported: tensor type Q2_K; supported: F32"),
        ("Q4_0", (32,), 17, "there are 17 bytes"),
        ("Q4_0", (31,), 18, "there are 18 bytes"),
        ("Q4_0", (1 << 62, 1 << 62), 18, "there are 18 bytes"),
        ("F32", (3,), 11, "there are 11 bytes"),
    ],
)
def test_impossible_input_is_refused(
    type_name: str, shape: tuple[int, ...], num_bytes: int, words: str
) -> None:
    with pytest.raises(ModelFileError, match=words):
        dequantize(memoryview(bytes(num_bytes)), type_name, shape, torch.float32)
