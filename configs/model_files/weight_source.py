"""Checkpoints that an engine has taken weights from: which files, and whether they are the same."""

import hashlib
from pathlib import Path

import msgspec

from headrace.configs.errors import InvalidRequestError, ModelFileError
from headrace.configs.model_files.safetensors_index import read_safetensors_index

_CHUNK_BYTES = 1 << 22

# Of one file: path, size in bytes, time of its last change in ns, inode.
FileStamp = tuple[str, int, int, int]


class WeightSource(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint with what it held: `digest` covers the bytes of its weight files.

    `stamps` tell cheaply, on one machine, that nobody has written to the files since.
    """

    path: str  # absolute, without symbolic links
    digest: str  # SHA-256, hexadecimal
    stamps: list[FileStamp] = []

    def check_untouched(self) -> None:
        """Raise ModelFileError if the files are not those that the digest is of."""
        if stamps_of(self.path) != self.stamps:
            raise ModelFileError(
                f"{self.path} has changed since its weights were read: load the weights again, "
                "under a version of their own"
            )


def weight_files(path: str | Path) -> list[Path]:
    """The files with the weights of a checkpoint: the `.gguf` file, or safetensors in a folder.

    Raises ModelFileError.
    """
    path = Path(path)
    if path.is_dir():
        return sorted({tensor.file for tensor in read_safetensors_index(path).values()})
    if not path.is_file():
        raise ModelFileError(f"{path} is neither a folder of safetensors nor a .gguf file")
    return [path]


def stamps_of(path: str | Path) -> list[FileStamp]:
    """The stamps of its weight files now. Raises ModelFileError."""
    stamps: list[FileStamp] = []
    for file in weight_files(path):
        try:
            facts = file.stat()
        except OSError as error:
            raise ModelFileError(f"{file} cannot be read: {error}") from error
        stamps.append((str(file), facts.st_size, facts.st_mtime_ns, facts.st_ino))
    return stamps


def read_source(path: str | Path) -> WeightSource:
    """Read the files of a checkpoint through, for their digest. Raises ModelFileError."""
    stamps, total = stamps_of(path), hashlib.sha256()
    for file, size, _, _ in stamps:
        total.update(f"{Path(file).name}\0{size}\0".encode("utf-8", "surrogateescape"))
        try:
            with open(file, "rb") as opened:
                while chunk := opened.read(_CHUNK_BYTES):
                    total.update(chunk)
        except OSError as error:
            raise ModelFileError(f"{file} cannot be read: {error}") from error
    source = WeightSource(str(path), total.hexdigest(), stamps)
    source.check_untouched()
    return source


def path_below(root: str | None, given: str) -> Path:
    """`given`, taken from `root` if it is relative, without symbolic links, which must be below it.

    So must its weight files be. Raises InvalidRequestError, ModelFileError for no checkpoint.
    """
    if root is None:
        raise InvalidRequestError(
            "weights are taken from a path only if the engine was started with "
            "--weight-update-root FOLDER",
            "path",
        )
    try:
        path = (Path(root) / given).resolve(strict=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise InvalidRequestError(f"path {given!r} cannot be used: {error}", "path") from error
    places = [path]
    if path.is_relative_to(root):
        places += [file.resolve() for file in weight_files(path)]
    if not all(place.is_relative_to(root) for place in places):
        raise InvalidRequestError(
            f"path {given!r} leads out of {root}, the folder of --weight-update-root", "path"
        )
    return path
