"""Options of loading weights."""

# ruff: noqa: RUF009 (every default here is made by option(), a dataclass field)

import dataclasses
from functools import partial
from typing import Any

from headrace.configs.options import option

LOAD_FORMATS = (
    "auto", "pt", "safetensors", "npcache", "dummy", "tensorizer", "sharded_state", "gguf",
    "bitsandbytes", "mistral", "runai_streamer", "runai_streamer_sharded", "fastsafetensors",
)  # fmt: skip

_option = partial(option, group="LoadConfig")
_later = partial(_option, status="later")


@dataclasses.dataclass
class LoadOptions:
    """Where weights come from and in which format."""

    load_format: str = _later(
        "auto",
        "format of the weights; dummy: random ones, for measuring speed",
        choices=LOAD_FORMATS,
        holds=["safetensors", "gguf", "dummy"],
    )
    weight_update_root: str | None = _option(
        None, "folder whose checkpoints may replace the weights while the engine runs (default: "
        "none may)",
    )  # fmt: skip
    weight_transfer_config: dict[str, Any] | None = _option(
        None, 'JSON such as {"backend": "gloo"}: lets a trainer send weights while the engine '
        "runs; gloo broadcasts them, shm leaves them in shared memory",
    )  # fmt: skip
    download_dir: str | None = _option(None, "where hub downloads are kept")
    model_loader_extra_config: dict[str, Any] = _later({}, "options of the loader, as JSON")
    ignore_patterns: str | list[str] | None = _later(
        None, "files of a repository not to download", holds=["original/**/*"]
    )
    use_tqdm_on_load: bool = _option(True, "show the progress of downloads")
    pt_load_map_location: str | dict[str, str] = _later(
        "cpu", "device for the tensors of PyTorch checkpoints", parse=str
    )
