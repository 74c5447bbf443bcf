"""Options of weight updates and sleep, and checkpoints by path and digest."""

import os
from pathlib import Path
from typing import Any

import pytest

from headrace.configs.config import SleepConfig, WeightTransferConfig
from headrace.configs.errors import (
    ConfigurationError,
    InvalidRequestError,
    ModelFileError,
    UnsupportedFeatureError,
)
from headrace.configs.model_files.weight_source import path_below, read_source
from headrace.configs.weight_transfer import resolve_sleep, resolve_weight_transfer


def test_nothing_is_allowed_by_default() -> None:
    assert resolve_weight_transfer(None, None) == WeightTransferConfig(None, None)
    assert resolve_sleep(False, None) == SleepConfig(False, None)


def test_backends(tmp_path: Path) -> None:
    assert resolve_weight_transfer(None, {}).backend == "gloo"
    found = resolve_weight_transfer(str(tmp_path), {"backend": "shm"})
    assert found == WeightTransferConfig(str(tmp_path), "shm")


@pytest.mark.parametrize(
    "name", ["nccl", "ipc", "sparse_nccl", "nccl_m2n", "sharded_rdt", "modelexpress"]
)
def test_backends_of_gpus_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=rf"{name} .*GPUs.*gloo, shm"):
        resolve_weight_transfer(None, {"backend": name})


@pytest.mark.parametrize("given", [{"backend": "tcp"}, {"backend": 3}, {"rank": 1}])
def test_other_settings_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="weight_transfer_config"):
        resolve_weight_transfer(None, given)


def test_folders_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("nowhere", "file", "a\0b"):
        with pytest.raises(ConfigurationError, match="weight_update_root"):
            resolve_weight_transfer(str(tmp_path / name), None)
        with pytest.raises(ConfigurationError, match="sleep_spill_dir"):
            resolve_sleep(True, str(tmp_path / name))


def test_a_digest_is_of_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"1")
    first = read_source(path)
    first.check_untouched()
    path.write_bytes(b"2")
    os.utime(path, ns=(1, 1))
    with pytest.raises(ModelFileError, match="has changed"):
        first.check_untouched()
    assert read_source(path).digest != first.digest
    path.write_bytes(b"1")
    assert read_source(path).digest == first.digest
    path.unlink()
    with pytest.raises(ModelFileError):
        first.check_untouched()


def test_paths_stay_below_the_root(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside.gguf"
    root.mkdir()
    outside.write_bytes(b"secret")
    (root / "a.gguf").write_bytes(b"1")
    (root / "link.gguf").symlink_to(root / "a.gguf")
    (root / "away.gguf").symlink_to(outside)
    assert path_below(str(root), "a.gguf") == root / "a.gguf"
    assert path_below(str(root), "link.gguf") == root / "a.gguf"
    assert path_below(str(root), str(root / "a.gguf")) == root / "a.gguf"
    for given in ("../outside.gguf", str(outside), "away.gguf", "a.gguf/../../outside.gguf"):
        with pytest.raises(InvalidRequestError, match=r"leads out|cannot be used"):
            path_below(str(root), given)
    for given in ("", "nowhere", "a\0b"):
        with pytest.raises((InvalidRequestError, ModelFileError)):
            path_below(str(root), given)
    with pytest.raises(InvalidRequestError, match="--weight-update-root"):
        path_below(None, "a.gguf")
