"""Read the small JSON files of a model directory, with one clear error for each failure."""

import json
from pathlib import Path
from typing import Any

from headrace.configs.errors import ModelFileError

MAX_JSON_BYTES = 1 << 26


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in `path`. Raises `ModelFileError` if it is missing, too large or no object."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ModelFileError(
                f"{path}: {size} bytes, above the limit of {MAX_JSON_BYTES} for JSON files"
            )
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelFileError(
            f"{path}: the file is missing. Give a complete model directory, or download the model "
            "again"
        ) from None
    except OSError as error:
        raise ModelFileError(f"{path}: cannot read the file: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(
            f"{path}: not valid JSON: {error}. The file is corrupt: download it again"
        ) from error
    if not isinstance(value, dict):
        raise ModelFileError(
            f"{path}: holds a JSON {type(value).__name__}, not an object. Download it again"
        )
    return value


def read_optional_json_object(path: Path) -> dict[str, Any]:
    """The object in `path`, or {} if there is no such file. Raises as `read_json_object`."""
    return read_json_object(path) if path.exists() else {}
