"""Find the tensors of a safetensors checkpoint (one file or shards) from the headers alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors import SafetensorError, safe_open

from headrace.configs.errors import ModelFileError
from headrace.configs.model_files.json_file import read_json_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Element type in the file -> name in torch. Other types belong to quantized checkpoints.
DTYPES: Mapping[str, str] = MappingProxyType(
    {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
)


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is: `shape` and `dtype` (its name in torch) are from the header of `file`."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def read_safetensors_index(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of the checkpoint in `directory` by name, grouped by file.

    Opens every file, so that a missing shard, a corrupt header, a truncated file or a tensor that a
    shard lacks is found before any weight is read: `ModelFileError`, naming it.
    """
    if (directory / SINGLE_FILE).exists():
        return _read_header(directory / SINGLE_FILE)
    if not (directory / INDEX_FILE).exists():
        raise ModelFileError(_nothing_found(directory))
    tensors: dict[str, StoredTensor] = {}
    for file, names in _shards(directory).items():
        found = _read_header(file)
        missing = sorted(names - set(found))
        if missing:
            raise ModelFileError(
                f"{file}: {len(missing)} tensors that {INDEX_FILE} promises are missing, the "
                f"first is {missing[0]}. Download the model again"
            )
        tensors |= {name: tensor for name, tensor in found.items() if name in names}
    return tensors


def corrupt_file(file: Path, error: Exception) -> ModelFileError:
    """The error for a file that the safetensors library refuses."""
    size = file.stat().st_size if file.exists() else 0
    return ModelFileError(
        f"{file}: {size} bytes, truncated or not a safetensors file ({error}). Download it again"
    )


def _shards(directory: Path) -> dict[Path, set[str]]:
    """The names of the tensors that the index expects in each shard."""
    index = directory / INDEX_FILE
    weight_map: Any = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{index}: no weight_map. The file is corrupt: download it again")
    shards: dict[Path, set[str]] = {}
    for name, file_name in weight_map.items():
        is_plain = isinstance(file_name, str) and file_name.isprintable()
        if not is_plain or Path(file_name).name != file_name or file_name == "..":
            raise ModelFileError(
                f"{index}: {name} is said to be in {file_name!r}, which is not the name of a file "
                "beside it"
            )
        shards.setdefault(directory / file_name, set()).add(name)
    missing = sorted(file.name for file in shards if not file.is_file())
    if missing:
        raise ModelFileError(
            f"{directory}: {len(missing)} of {len(shards)} shards are missing: "
            f"{', '.join(missing[:5])}. Download the model again"
        )
    return shards


def _read_header(file: Path) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    try:
        with safe_open(file, framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                header = opened.get_slice(name)
                kind = header.get_dtype()
                if kind not in DTYPES:
                    raise ModelFileError(
                        f"{file}: not supported: {name} has elements of type {kind}; supported: "
                        f"{', '.join(DTYPES)}. Use an unquantized checkpoint or a GGUF file of "
                        "the model"
                    )
                tensors[name] = StoredTensor(file, tuple(header.get_shape()), DTYPES[kind])
    except (SafetensorError, OSError, ValueError) as error:
        raise corrupt_file(file, error) from error
    return tensors


def _nothing_found(directory: Path) -> str:
    others = sorted(
        file.name
        for pattern in ("*.safetensors", "*.bin", "*.pth", "*.pt", "*.gguf")
        for file in directory.glob(pattern)
    )
    found = f"found only {', '.join(others[:5])}" if others else "found no weights at all"
    return (
        f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE} is there ({found}). Give a "
        "directory with safetensors weights, or the path of a .gguf file"
    )
