"""The GGUF parser against files of the `gguf` package, and against damage of every kind."""

import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.configs.errors import ModelFileError
from headrace.configs.model_files.gguf import GGUFFile

F32 = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
Q8_0 = np.arange(3 * 2 * 34, dtype=np.uint8).reshape(3, 68)  # 3 rows of 64 elements


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with metadata of every type and two tensors, written by the `gguf` package."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("scalar.u8", 200)
    writer.add_int8("scalar.i8", -100)
    writer.add_uint16("scalar.u16", 60000)
    writer.add_int16("scalar.i16", -30000)
    writer.add_uint32("scalar.u32", 4_000_000_000)
    writer.add_int32("scalar.i32", -2_000_000_000)
    writer.add_uint64("scalar.u64", 2**63)
    writer.add_int64("scalar.i64", -(2**62))
    writer.add_float32("scalar.f32", 0.5)
    writer.add_float64("scalar.f64", 0.1)
    writer.add_bool("scalar.bool", True)
    writer.add_string("scalar.string", "héllo")
    writer.add_array("array.strings", ["a", "bc", "", "日本"])
    writer.add_array("array.ints", [1, -2, 3])
    writer.add_array("array.floats", [0.5, 1.5])
    writer.add_array("array.bools", [True, False])
    writer.add_tensor("float.weight", F32)
    writer.add_tensor("quant.weight", Q8_0, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def tiny_bytes(tiny_path: Path) -> bytes:
    return tiny_path.read_bytes()


@pytest.fixture
def open_bytes(tmp_path: Path) -> Callable[[bytes], GGUFFile]:
    """Open a file with the given content."""

    def open_it(content: bytes) -> GGUFFile:
        path = tmp_path / "case.gguf"
        path.unlink(missing_ok=True)  # the old one may still be mapped
        path.write_bytes(content)
        return GGUFFile.open(path)

    return open_it


def read_everything(file: GGUFFile) -> None:
    for key in file.metadata:
        file.metadata[key]
    for tensor in file.tensors.values():
        assert len(file.data(tensor)) == tensor.num_bytes


def test_reads_what_the_gguf_package_wrote(tiny_path: Path) -> None:
    with GGUFFile.open(tiny_path) as file:
        metadata = file.metadata
        assert file.version == 3
        assert metadata["general.architecture"] == "llama"
        assert metadata["scalar.u8"] == 200
        assert metadata["scalar.i8"] == -100
        assert metadata["scalar.u16"] == 60000
        assert metadata["scalar.i16"] == -30000
        assert metadata["scalar.u32"] == 4_000_000_000
        assert metadata["scalar.i32"] == -2_000_000_000
        assert metadata["scalar.u64"] == 2**63
        assert metadata["scalar.i64"] == -(2**62)
        assert metadata["scalar.f32"] == 0.5
        assert metadata["scalar.f64"] == 0.1
        assert metadata["scalar.bool"] is True
        assert metadata["scalar.string"] == "héllo"
        assert metadata["array.strings"] == ["a", "bc", "", "日本"]
        assert metadata["array.ints"].tolist() == [1, -2, 3]
        assert metadata["array.floats"].tolist() == [0.5, 1.5]
        assert metadata["array.bools"].tolist() == [True, False]
        assert "nothing" not in metadata
        assert metadata.get("nothing") is None
        floats, quants = file.tensors["float.weight"], file.tensors["quant.weight"]
        assert (floats.shape, floats.type_name, floats.num_bytes) == ((2, 3, 4), "F32", 96)
        assert (quants.shape, quants.type_name, quants.num_bytes) == ((3, 64), "Q8_0", 204)
        assert bytes(file.data(floats)) == F32.tobytes()
        assert bytes(file.data(quants)) == Q8_0.tobytes()
        assert file.data(floats).readonly


def test_closing_keeps_views_alive_and_refuses_look_ups(tiny_path: Path) -> None:
    file = GGUFFile.open(tiny_path)
    view = file.data(file.tensors["float.weight"])
    file.close()
    assert bytes(view) == F32.tobytes()
    with pytest.raises(ValueError, match="released"):
        file.metadata["array.ints"]


def test_every_truncation_is_reported(
    tiny_path: Path, tiny_bytes: bytes, open_bytes: Callable[[bytes], GGUFFile]
) -> None:
    with GGUFFile.open(tiny_path) as file:
        end = max(t.offset + t.num_bytes for t in file.tensors.values())
    for size in range(end):
        with pytest.raises(ModelFileError, match=r"truncated|not a GGUF") as caught:
            open_bytes(tiny_bytes[:size])
        assert "case.gguf" in str(caught.value)
    assert "so 1 bytes are missing. Download it again" in str(caught.value)
    open_bytes(tiny_bytes[:end]).close()  # only padding is cut off


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_random_damage_only_gives_model_file_errors(
    tiny_bytes: bytes, open_bytes: Callable[[bytes], GGUFFile], data: st.DataObject
) -> None:
    content = bytearray(tiny_bytes)
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(content) - 1))
        width = data.draw(st.sampled_from([1, 1, 4, 8]))
        value = data.draw(
            st.one_of(
                st.integers(0, 256**width - 1),
                st.sampled_from([0, 1, 9, 2 ** (8 * width) - 1, 2 ** (8 * width - 1)]),
            )
        )
        content[at : at + width] = (value % 256**width).to_bytes(width, "little")
    try:
        with open_bytes(bytes(content)) as file:
            read_everything(file)
    except ModelFileError as error:
        assert "case.gguf" in str(error)


def test_each_byte_flipped_only_gives_model_file_errors(
    tiny_bytes: bytes, open_bytes: Callable[[bytes], GGUFFile]
) -> None:
    for at in range(len(tiny_bytes) - Q8_0.nbytes - F32.nbytes):
        content = bytearray(tiny_bytes)
        content[at] ^= 0xFF
        try:
            with open_bytes(bytes(content)) as file:
                read_everything(file)
        except ModelFileError:
            pass


def header(version: int = 3, num_tensors: int = 0, num_keys: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)


def text(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


def key_value(key: bytes, value_type: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", value_type) + value


def tensor(dims: list[int], kind: int = 0, offset: int = 0, rank: int | None = None) -> bytes:
    count = len(dims) if rank is None else rank
    return (
        text(b"w")
        + struct.pack("<I", count)
        + struct.pack(f"<{len(dims)}Q", *dims)
        + struct.pack("<IQ", kind, offset)
    )


HUGE = 2**64 - 1
PADDING = bytes(256)


def hostile_files() -> Iterator[tuple[str, bytes, str]]:
    """Name, content and words of the message."""
    yield "empty", b"", "not a GGUF file"
    yield "zip", b"PK\x03\x04" + PADDING, "not a GGUF file"
    yield "lfs", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"
    yield "version-1", header(version=1) + PADDING, "version 1 is not supported; supported: 2, 3"
    yield "version-99", header(version=99) + PADDING, "version 99 is not supported"
    yield "big-endian", b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + PADDING, "big-endian"
    yield "tensors", header(num_tensors=HUGE) + PADDING, "number of tensors is 18446744073709551615"
    yield "tensors-fit", header(num_tensors=100_000) + PADDING, "truncated"
    yield "keys", header(num_keys=HUGE) + PADDING, "number of metadata keys is"
    yield "keys-fit", header(num_keys=60_000) + PADDING, "truncated"
    for length in (HUGE, 2**63, 2**32, 65_000):
        yield f"key-{length}", header(num_keys=1) + text(b"k", length) + PADDING, "key"
        long_text = key_value(b"k", 8, text(b"", length))
        yield f"string-{length}", header(num_keys=1) + long_text + PADDING, "value of 'k'"
        for item_type in (0, 8, 12):
            array = key_value(b"k", 9, struct.pack("<IQ", item_type, length))
            yield (
                f"array-{item_type}-{length}",
                header(num_keys=1) + array + PADDING,
                "length of 'k'",
            )
        strings = key_value(b"k", 9, struct.pack("<IQ", 8, 2) + text(b"", length))
        yield f"item-{length}", header(num_keys=1) + strings + PADDING, "beyond the end"
    nested = key_value(b"k", 9, struct.pack("<IQIQ", 9, 1, 0, 1) + b"x")
    yield "nested", header(num_keys=1) + nested + PADDING, "array of arrays"
    yield "type", header(num_keys=1) + key_value(b"k", 77, b"") + PADDING, "unknown type 77"
    array_type = key_value(b"k", 9, struct.pack("<IQ", 77, 1))
    yield "item-type", header(num_keys=1) + array_type + PADDING, "unknown type 77"
    yield "bool", header(num_keys=1) + key_value(b"k", 7, b"\x02") + PADDING, "boolean 'k' is 2"
    twice = key_value(b"k", 0, b"\x01") * 2
    yield "key-twice", header(num_keys=2) + twice + PADDING, "appears twice"
    yield "utf-8", header(num_keys=1) + key_value(b"\xff", 0, b"\x01") + PADDING, "UTF-8"
    for alignment in (0, 3, 33, 2**31):
        entry = key_value(b"general.alignment", 4, struct.pack("<I", alignment))
        yield f"alignment-{alignment}", header(num_keys=1) + entry + PADDING, "power of two"
    entry = key_value(b"general.alignment", 8, text(b"32"))
    yield "alignment-text", header(num_keys=1) + entry + PADDING, "power of two"
    one = header(num_tensors=1)
    yield "rank-0", one + tensor([]) + PADDING, "rank 0"
    yield "rank-5", one + tensor([1] * 5) + PADDING, "rank 5"
    yield "rank-huge", one + tensor([1], rank=2**32 - 1) + PADDING, "rank 4294967295"
    yield "dim-0", one + tensor([0]) + PADDING, "impossible shape"
    yield "dim-huge", one + tensor([HUGE]) + PADDING, "impossible shape"
    yield "overflow", one + tensor([1000, 1000, 1000, 1000]) + PADDING, "bytes are missing"
    yield "block", one + tensor([33], kind=2) + PADDING, "impossible shape"
    yield "tensor-type", one + tensor([4], kind=1234) + PADDING, "unknown element type 1234"
    yield "offset", one + tensor([4], offset=HUGE - 31) + PADDING, "bytes are missing"
    yield "misaligned", one + tensor([4], offset=1) + PADDING, "not a multiple of 32"
    yield "tensor-twice", header(num_tensors=2) + tensor([4]) * 2 + PADDING, "appears twice"


@pytest.mark.parametrize(
    ("content", "words"),
    [pytest.param(content, words, id=name) for name, content, words in hostile_files()],
)
def test_hostile_files_are_refused_without_allocating(
    content: bytes, words: str, open_bytes: Callable[[bytes], GGUFFile]
) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError, match=words):
            open_bytes(content)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_text_that_is_not_utf8_in_an_array_is_reported_when_read(
    open_bytes: Callable[[bytes], GGUFFile],
) -> None:
    array = key_value(b"k", 9, struct.pack("<IQ", 8, 2) + text(b"ok") + text(b"\xff\xfe"))
    file = open_bytes(header(num_keys=1) + array + PADDING)
    with file, pytest.raises(ModelFileError, match="item 1 of 'k'"):
        file.metadata["k"]


def test_version_2_is_read(open_bytes: Callable[[bytes], GGUFFile]) -> None:
    content = header(version=2, num_tensors=1, num_keys=1)
    content += key_value(b"k", 4, struct.pack("<I", 7)) + tensor([4])
    content += bytes(-len(content) % 32) + np.arange(4, dtype=np.float32).tobytes()
    with open_bytes(content) as file:
        assert file.metadata["k"] == 7
        values = np.frombuffer(file.data(file.tensors["w"]), np.float32)
        assert values.tolist() == [0, 1, 2, 3]
        del values


@pytest.mark.parametrize("name", ["absent.gguf", "."])
def test_what_cannot_be_opened_is_a_model_file_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="cannot read"):
        GGUFFile.open(tmp_path / name)


@pytest.mark.slow
def test_opening_a_real_file_is_quick(gemma3_gguf: Path) -> None:
    """The 262,144 tokens are stepped over, not decoded (limits are generous for busy machines)."""
    GGUFFile.open(gemma3_gguf).close()
    start = time.perf_counter()
    with GGUFFile.open(gemma3_gguf) as file:
        opened = time.perf_counter()
        tokens = file.metadata["tokenizer.ggml.tokens"]
        decoded = time.perf_counter()
        assert len(tokens) == len(file.metadata["tokenizer.ggml.scores"]) == 262_144
    assert opened - start < 0.25
    assert decoded - opened < 1.5
