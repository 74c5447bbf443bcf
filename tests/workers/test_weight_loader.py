"""Weights from safetensors directories and real files, against transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from headrace.configs.errors import ModelFileError
from headrace.configs.model_files.model_info import read_model_info
from headrace.workers.weight_loader import iter_weights

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama-tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-biased": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "mistral": lambda: transformers.MistralConfig(**SIZES),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES),
}


def make_model(name: str) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())


def expected_weights(model: Any) -> dict[str, torch.Tensor]:
    state = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def load(directory: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return dict(iter_weights(directory, read_model_info(directory).hf_config, dtype))


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert set(ours) == set(theirs)
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name


@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"], ids=["single", "sharded"])
@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_those_of_transformers(name: str, max_shard_size: str, tmp_path: Path) -> None:
    model = make_model(name)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors").exists() == (max_shard_size == "1GB")
    expected = expected_weights(model)
    assert_equal(load(tmp_path), expected)
    halves = {key: value.bfloat16() for key, value in expected.items()}
    assert_equal(load(tmp_path, torch.bfloat16), halves)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    make_model("llama").save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def sharded_dir(tmp_path: Path) -> Path:
    make_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    return tmp_path


def test_a_stored_tied_head_is_left_out(tmp_path: Path) -> None:
    model = make_model("llama-tied")
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["lm_head.weight"] = torch.zeros(96, 64)
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(state, tmp_path / "model.safetensors")
    assert_equal(load(tmp_path), expected_weights(model))


def change_state(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    state = load_file(directory / "model.safetensors")
    change(state)
    save_file(state, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda state: state.pop("model.layers.1.mlp.up_proj.weight"),
            r"1 of 21 weights are missing, the first is model\.layers\.1\.mlp\.up_proj\.weight",
        ),
        (
            lambda state: state.update({"model.layers.0.mlp.gate.weight": torch.zeros(2)}),
            r"do not belong .*the first is model\.layers\.0\.mlp\.gate\.weight",
        ),
        (
            lambda state: state.update({"model.norm.weight": torch.zeros(63)}),
            r"model\.norm\.weight has shape \[63\], but config\.json asks for \[64\]",
        ),
        (
            lambda state: state.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}),
            r"not supported: model\.norm\.weight has elements of type I8",
        ),
    ],
    ids=["missing", "unknown", "shape", "type"],
)
def test_wrong_weights_are_named(
    change: Callable[[dict[str, torch.Tensor]], object], words: str, model_dir: Path
) -> None:
    change_state(model_dir, change)
    with pytest.raises(ModelFileError, match=words):
        load(model_dir)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
def test_truncated_files_are_named(keep: int, model_dir: Path) -> None:
    file = model_dir / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelFileError, match=r"model\.safetensors: \d+ bytes, truncated"):
        load(model_dir)


def test_damaged_headers_only_give_model_file_errors(model_dir: Path) -> None:
    file = model_dir / "model.safetensors"
    content = file.read_bytes()
    for at in [*range(10), *range(10, 1200, 23)]:
        damaged = bytearray(content)
        damaged[at] ^= 0xFF
        file.unlink()
        file.write_bytes(damaged)
        with pytest.raises(ModelFileError):
            load(model_dir)


def test_a_missing_shard_is_named(sharded_dir: Path) -> None:
    shard = sorted(sharded_dir.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelFileError, match=f"shards are missing: {shard.name}"):
        load(sharded_dir)


def test_a_tensor_that_a_shard_lacks_is_named(sharded_dir: Path) -> None:
    index = json.loads((sharded_dir / "model.safetensors.index.json").read_text())
    shard = sharded_dir / index["weight_map"]["model.norm.weight"]
    state = load_file(shard)
    del state["model.norm.weight"]
    save_file(state or {"other": torch.zeros(1)}, shard)
    with pytest.raises(ModelFileError, match=r"the first is model\.norm\.weight"):
        load(sharded_dir)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({}, "no weight_map"),
        ({"weight_map": []}, "no weight_map"),
        ({"weight_map": {"a": "../model.safetensors"}}, "not the name of a file beside it"),
        ({"weight_map": {"a": "/etc/passwd"}}, "not the name of a file beside it"),
        ({"weight_map": {"a": 1}}, "not the name of a file beside it"),
        ({"weight_map": {"a": ".."}}, "not the name of a file beside it"),
        ({"weight_map": {"a": "\0"}}, "not the name of a file beside it"),
    ],
    ids=str,
)
def test_bad_indexes_are_refused(index: Any, words: str, sharded_dir: Path) -> None:
    (sharded_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match=words):
        load(sharded_dir)


def test_other_formats_are_named(model_dir: Path) -> None:
    (model_dir / "model.safetensors").rename(model_dir / "pytorch_model.bin")
    with pytest.raises(ModelFileError, match=r"found only pytorch_model\.bin"):
        load(model_dir)
    (model_dir / "pytorch_model.bin").unlink()
    with pytest.raises(ModelFileError, match="found no weights at all"):
        load(model_dir)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_real_gguf_weights_are_those_of_the_reference(
    name: str, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(f"{name}_gguf")
    directory: Path = request.getfixturevalue(f"{name}_hf")
    theirs = load_file(directory / "model.safetensors")
    hf_config = read_model_info(path).hf_config
    for key, weight in iter_weights(path, hf_config, torch.float32):
        assert torch.equal(weight, theirs.pop(key)), key
    assert not theirs
