"""Read GGUF model files: bounds-checked, by mmap, without copying weights.

Format (GGUF v2 and v3, little endian): a header (magic, version, number of tensors, number of
keys), the metadata key-value pairs, one record per tensor (name, dimensions, element type, offset),
and, aligned, the tensor data. Nothing in the file is trusted: every count, length and offset is
compared with the file size before anything is allocated, and every failure is a `ModelFileError`
with the path, the byte offset and what to do.
"""

import contextlib
import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NoReturn

import numpy as np

from headrace.configs.errors import ModelFileError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32  # bytes

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_KEY_BYTES = (1 << 16) - 1
MAX_TENSOR_NAME_BYTES = 255
MAX_STRING_BYTES = 1 << 24
MAX_ARRAY_ITEMS = 1 << 24
MAX_ARRAY_BYTES = 1 << 28
MAX_ALIGNMENT = 1 << 20
MAX_RANK = 4

# Element types by their number in the file: name, elements per block, bytes per block.
_TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}

# Type name -> (elements per block, bytes per block).
BLOCK_SIZES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {name: (elements, num_bytes) for name, elements, num_bytes in _TENSOR_TYPES.values()}
)

# Metadata value types by their number in the file; arrays are 9 and strings 8.
_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<B"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

# A length and one byte of key, a type, the smallest value.
_MIN_KEY_VALUE_BYTES = 8 + 1 + 4 + 1
# A length and one byte of name, a rank, one dimension, a type, an offset.
_MIN_TENSOR_RECORD_BYTES = 8 + 1 + 4 + 8 + 4 + 8


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor in the file; `shape` is row-major, the reverse of the order in the file."""

    name: str
    shape: tuple[int, ...]
    type_name: str  # a key of `BLOCK_SIZES`
    offset: int  # bytes from the start of the file
    num_bytes: int


class GGUFFile:
    """An open GGUF file; use as a context manager or call `close()`.

    `metadata` maps keys to int, float, bool, str, numpy array (numbers) or list of str. Arrays are
    decoded when first looked up. `tensors` maps names to `GGUFTensor`, in file order. Raises
    `ModelFileError` from `open` for anything wrong with the file, and from a metadata look-up for
    text that is not UTF-8. The file must not be shortened while it is open.
    """

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        self.path = path
        self._mapping = mapping
        self._view = memoryview(mapping)
        cursor = _Cursor(path, self._view)
        self.version = cursor.header_version()
        num_tensors = cursor.count("number of tensors", MAX_TENSORS, _MIN_TENSOR_RECORD_BYTES)
        num_keys = cursor.count("number of metadata keys", MAX_KEYS, _MIN_KEY_VALUE_BYTES)
        self.metadata: Mapping[str, Any] = _Metadata(cursor, num_keys)
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        self.alignment = _checked_alignment(path, alignment)
        self.tensors = _read_tensors(cursor, num_tensors, self.alignment)

    @classmethod
    def open(cls, path: str | Path) -> "GGUFFile":
        """Map `path` and read its header. Weights are only touched by `data`."""
        path = Path(path)
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                head = file.read(len(MAGIC) + 20)
                _check_magic(path, head, size)
                mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelFileError(f"{path}: cannot read this GGUF file: {error}") from error
        try:
            return cls(path, mapping)
        except BaseException:
            _close_mapping(mapping)
            raise

    def data(self, tensor: GGUFTensor) -> memoryview:
        """The raw bytes of a tensor of this file, [tensor.num_bytes], read-only and not copied."""
        return self._view[tensor.offset : tensor.offset + tensor.num_bytes]

    def close(self) -> None:
        """Unmap the file once the last view of it is gone; array look-ups raise ValueError."""
        self._view.release()
        _close_mapping(self._mapping)

    def __enter__(self) -> "GGUFFile":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _Cursor:
    """A position in the header that only moves forward, and only within the file."""

    def __init__(self, path: Path, view: memoryview) -> None:
        self.path = path
        self.view = view
        self.size = len(view)
        self.position = len(MAGIC)

    def fail(self, problem: str, position: int | None = None) -> NoReturn:
        at = self.position if position is None else position
        raise ModelFileError(
            f"{self.path}: {problem} (at byte {at} of {self.size}). The file is corrupt or not a "
            "model: download it again"
        )

    def need(self, num_bytes: int, what: str) -> None:
        missing = self.position + num_bytes - self.size
        if missing > 0:
            self.fail(f"truncated in its header: {what} needs {missing} bytes more than there are")

    def number(self, layout: struct.Struct, what: str) -> int | float:
        self.need(layout.size, what)
        (value,) = layout.unpack_from(self.view, self.position)
        self.position += layout.size
        return value

    def integer(self, layout: struct.Struct, what: str) -> int:
        value = self.number(layout, what)
        assert isinstance(value, int)
        return value

    def count(self, what: str, limit: int, min_bytes: int) -> int:
        """A 64-bit count of things that take at least `min_bytes` each in the rest of the file."""
        start = self.position
        count = self.integer(_U64, what)
        if count > limit:
            self.fail(f"the {what} is {count}, above the limit of {limit}", start)
        self.need(count * min_bytes, f"{what} {count}")
        return count

    def string(self, what: str, limit: int) -> str:
        start = self.position
        length = self.count(f"length of the {what}", limit, 1)
        raw = self.view[self.position : self.position + length]
        try:
            text = str(raw, "utf-8")
        except UnicodeDecodeError:
            self.fail(f"the {what} is not UTF-8 text", start)
        self.position += length
        return text

    def skip_strings(self, count: int, what: str) -> None:
        """Step over `count` strings; a bad length leads out of the file, where reading fails."""
        start = position = self.position
        view, unpack = self.view, _U64.unpack_from
        try:
            for _ in range(count):
                position += 8 + unpack(view, position)[0]
        except (struct.error, OverflowError):
            position = self.size + 1
        if position > self.size:
            self.fail(f"truncated in its header: {what} reaches beyond the end of the file", start)
        if position - start > MAX_ARRAY_BYTES:
            self.fail(
                f"{what} takes {position - start} bytes, above the limit of {MAX_ARRAY_BYTES}",
                start,
            )
        self.position = position

    def header_version(self) -> int:
        version = self.integer(_U32, "version")
        if version in VERSIONS:
            return version
        if version & 0xFFFF == 0 and version:
            raise ModelFileError(
                f"{self.path}: a big-endian GGUF file; only little-endian ones are supported. "
                "Download the little-endian file"
            )
        raise ModelFileError(
            f"{self.path}: GGUF version {version} is not supported; supported: "
            f"{', '.join(map(str, VERSIONS))}. Download a newer conversion of the model"
        )


@dataclass(frozen=True)
class _Array:
    """An array in the metadata, not decoded yet."""

    item_type: int
    count: int
    position: int


class _Metadata(Mapping[str, Any]):
    """The key-value pairs. Scalars and strings are read at once, arrays when they are looked up."""

    def __init__(self, cursor: _Cursor, num_keys: int) -> None:
        self._path = cursor.path
        self._view = cursor.view
        self._values: dict[str, Any] = {}
        for _ in range(num_keys):
            start = cursor.position
            key = cursor.string("key", MAX_KEY_BYTES)
            if key in self._values:
                cursor.fail(f"the key {key!r} appears twice", start)
            self._values[key] = _read_value(cursor, key)

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, _Array):
            value = self._decode(key, value)
            self._values[key] = value
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values  # without decoding

    def _decode(self, key: str, array: _Array) -> Any:
        if array.item_type != _STRING:
            dtype = np.dtype(_SCALARS[array.item_type].format)
            raw = np.frombuffer(self._view, dtype, array.count, array.position)
            return raw.astype(np.bool_) if array.item_type == _BOOL else raw.copy()
        view, unpack, position = self._view, _U64.unpack_from, array.position
        strings: list[str] = []
        try:
            for _ in range(array.count):
                start = position + 8
                position = start + unpack(view, position)[0]
                strings.append(str(view[start:position], "utf-8"))
        except UnicodeDecodeError:
            raise ModelFileError(
                f"{self._path}: item {len(strings)} of {key!r} (at byte {start}) is not UTF-8 "
                "text. The file is corrupt: download it again"
            ) from None
        return strings


def _read_value(cursor: _Cursor, key: str) -> Any:
    start = cursor.position
    value_type = cursor.integer(_U32, f"type of {key!r}")
    if value_type == _STRING:
        return cursor.string(f"value of {key!r}", MAX_STRING_BYTES)
    if value_type == _ARRAY:
        return _read_array(cursor, key)
    layout = _SCALARS.get(value_type)
    if layout is None:
        cursor.fail(f"{key!r} has the unknown type {value_type}", start)
    value = cursor.number(layout, f"value of {key!r}")
    if value_type != _BOOL:
        return value
    if value not in (0, 1):
        cursor.fail(f"the boolean {key!r} is {value}", start)
    return bool(value)


def _read_array(cursor: _Cursor, key: str) -> _Array:
    start = cursor.position
    item_type = cursor.integer(_U32, f"item type of {key!r}")
    if item_type == _ARRAY:
        cursor.fail(f"{key!r} is an array of arrays, which is not supported", start)
    if item_type != _STRING and item_type not in _SCALARS:
        cursor.fail(f"{key!r} is an array of the unknown type {item_type}", start)
    item_bytes = 8 if item_type == _STRING else _SCALARS[item_type].size
    count = cursor.count(f"length of {key!r}", MAX_ARRAY_ITEMS, item_bytes)
    array = _Array(item_type, count, cursor.position)
    if item_type == _STRING:
        cursor.skip_strings(count, f"{key!r}")
    else:
        cursor.position += count * item_bytes
    return array


def _read_tensors(cursor: _Cursor, num_tensors: int, alignment: int) -> dict[str, GGUFTensor]:
    records: dict[str, GGUFTensor] = {}
    for _ in range(num_tensors):
        start = cursor.position
        record = _read_tensor_record(cursor)
        if record.offset % alignment:
            cursor.fail(
                f"the data of {record.name!r} is at {record.offset}, not a multiple of {alignment}",
                start,
            )
        if record.name in records:
            cursor.fail(f"the tensor {record.name!r} appears twice", start)
        records[record.name] = record
    data_start = -(-cursor.position // alignment) * alignment
    end = data_start + max((t.offset + t.num_bytes for t in records.values()), default=0)
    if records and end > cursor.size:
        raise ModelFileError(
            f"{cursor.path}: truncated: it has {cursor.size} bytes but its tensors end at byte "
            f"{end}, so {end - cursor.size} bytes are missing. Download it again"
        )
    return {
        t.name: GGUFTensor(t.name, t.shape, t.type_name, data_start + t.offset, t.num_bytes)
        for t in records.values()
    }


def _read_tensor_record(cursor: _Cursor) -> GGUFTensor:
    """One record; its `offset` is still relative to the start of the tensor data."""
    start = cursor.position
    name = cursor.string("tensor name", MAX_TENSOR_NAME_BYTES)
    rank = cursor.integer(_U32, f"rank of {name!r}")
    if not name or not 1 <= rank <= MAX_RANK:
        cursor.fail(f"the tensor {name!r} has rank {rank}; 1 to {MAX_RANK} are possible", start)
    dims = [cursor.integer(_U64, f"shape of {name!r}") for _ in range(rank)]
    type_number = cursor.integer(_U32, f"type of {name!r}")
    offset = cursor.integer(_U64, f"offset of {name!r}")
    if type_number not in _TENSOR_TYPES:
        cursor.fail(f"the tensor {name!r} has the unknown element type {type_number}", start)
    type_name, block_elements, block_bytes = _TENSOR_TYPES[type_number]
    # A tensor has at least a bit per element, so this also bounds each dimension before they are
    # multiplied.
    if any(not 1 <= dim <= 8 * cursor.size for dim in dims) or dims[0] % block_elements:
        cursor.fail(
            f"the tensor {name!r} of type {type_name} has the impossible shape {dims[::-1]}", start
        )
    num_bytes = math.prod(dims) // block_elements * block_bytes
    return GGUFTensor(name, tuple(reversed(dims)), type_name, offset, num_bytes)


def _checked_alignment(path: Path, alignment: Any) -> int:
    is_power_of_two = type(alignment) is int and alignment > 0 and alignment & (alignment - 1) == 0
    if not is_power_of_two or alignment > MAX_ALIGNMENT:
        raise ModelFileError(
            f"{path}: general.alignment is {str(alignment)[:80]}; it must be a power of two of at "
            f"most {MAX_ALIGNMENT}. The file is corrupt: download it again"
        )
    return int(alignment)


def _check_magic(path: Path, head: bytes, size: int) -> None:
    if head.startswith(b"version https://git-lfs"):
        raise ModelFileError(
            f"{path}: a Git LFS pointer of {size} bytes, not the model itself. Run `git lfs pull` "
            "or download it"
        )
    if not head.startswith(MAGIC[: len(head)]) or not head:
        raise ModelFileError(f"{path}: not a GGUF file: it begins with {head[:4]!r}, not {MAGIC!r}")
    if len(head) < len(MAGIC) + 20:
        raise ModelFileError(
            f"{path}: truncated: {size} bytes, fewer than the {len(MAGIC) + 20} of a GGUF header. "
            "Download it again"
        )


def _close_mapping(mapping: mmap.mmap) -> None:
    with contextlib.suppress(BufferError):  # a view is still alive: the mapping goes with it
        mapping.close()
