"""From a model's name to its files: an existing path, an alias of the catalogue, or a hub id."""

import difflib
import os
from pathlib import Path

from headrace.configs.errors import ModelFileError
from headrace.configs.model_files.cache_dir import cache_dir
from headrace.configs.model_files.catalog import CATALOG
from headrace.configs.model_files.hub import HubName, download
from headrace.configs.model_files.pull import cached_file, pull


def resolve_model(
    name: str,
    *,
    revision: str | None = None,
    token: bool | str | None = None,
    download_dir: Path | None = None,
    progress: bool = True,
) -> Path:
    """The model directory or `.gguf` file that `name` stands for, fetched if it is not here yet.

    In this order: an existing path (a directory with one .gguf file and no config.json stands for
    that file), an alias, and `org/name` or `org/name:FILE.gguf` on the hub. `revision`, `token` and
    `download_dir` (instead of the hub's own cache) are for hub ids; `progress` reports on stderr.
    Raises ModelFileError when there is no such model or it cannot be fetched.
    """
    path = Path(name).expanduser()
    if name and path.exists():
        return _existing(path)
    if entry := CATALOG.get(name):
        cache = cache_dir(os.environ)
        return cached_file(entry, cache) or pull(entry, cache, progress=progress)
    if hub_name := HubName.parse(name):
        return download(
            hub_name, revision=revision, token=token, download_dir=download_dir, progress=progress
        )
    raise ModelFileError(_unknown_message(name))


def _existing(path: Path) -> Path:
    if not path.is_dir():
        if path.suffix == ".gguf":
            return path
        raise ModelFileError(
            f"{path}: a file, but not a .gguf file; name a .gguf file or a directory"
        )
    if (path / "config.json").exists():
        return path
    inside = sorted(path.glob("*.gguf"))
    if len(inside) == 1:
        return inside[0]
    if inside:
        raise ModelFileError(
            f"{path}: {len(inside)} .gguf files and no config.json; name one of them: "
            f"{', '.join(file.name for file in inside)}"
        )
    raise ModelFileError(
        f"{path}: neither config.json nor a .gguf file in this directory; it is not a model"
    )


def _unknown_message(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), CATALOG, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return (
        f"{name!r} is not a model: it is neither an existing path (a directory or a .gguf file), "
        f"nor an alias ({', '.join(CATALOG)}), nor a hub id (org/name, or "
        f"org/name:FILE.gguf).{hint}"
    )
