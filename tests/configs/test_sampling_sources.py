"""PP28: where each sampling default comes from, by source: files, folder, override, nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.configs.engine_args import EngineArgs
from headrace.configs.errors import ConfigurationError, ModelFileError
from tests.configs.test_engine_args import CONFIG

OVERRIDE = "--override-generation-config"
MODEL_FILE = "model file generation_config.json"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    generation = {"temperature": 0.6, "top_p": 0.9, "max_new_tokens": 50, "eos_token_id": [2, 7]}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    directory = tmp_path / "folder"
    directory.mkdir()
    generation = {"top_k": 5, "max_new_tokens": 30, "eos_token_id": 9, "do_sample": True}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def resolve(model: Path, **given: Any) -> tuple[dict[str, Any], dict[str, str], int | None]:
    config = EngineArgs(model=str(model), **given).create_engine_config().model_config
    assert set(config.sampling_param_sources) == set(config.default_sampling_params)
    return (
        config.default_sampling_params, config.sampling_param_sources, config.max_output_tokens,
    )  # fmt: skip


def test_from_the_model(model: Path) -> None:
    values, sources, limit = resolve(model)
    assert values == {"temperature": 0.6, "top_p": 0.9, "max_tokens": 50}
    assert set(sources.values()) == {MODEL_FILE}
    assert limit is None  # the model's own length is a default, not the operator's limit


def test_from_the_model_with_overrides(model: Path) -> None:
    override = {"temperature": 0.1, "min_p": 0.05, "max_new_tokens": 20}
    values, sources, limit = resolve(model, override_generation_config=override)
    assert values == {"temperature": 0.1, "top_p": 0.9, "min_p": 0.05, "max_tokens": 20}
    assert sources == {
        "temperature": OVERRIDE, "top_p": MODEL_FILE, "min_p": OVERRIDE, "max_tokens": OVERRIDE,
    }  # fmt: skip
    assert limit == 20


@pytest.mark.parametrize("name", ["headrace", "vllm"])
def test_own_defaults_only(name: str, model: Path) -> None:
    assert resolve(model, generation_config=name) == ({}, {}, None)
    values, sources, _ = resolve(
        model, generation_config=name, override_generation_config={"top_k": 3}
    )
    assert (values, sources) == ({"top_k": 3}, {"top_k": OVERRIDE})


def test_from_a_folder(model: Path, folder: Path) -> None:
    values, sources, limit = resolve(model, generation_config=str(folder))
    assert values == {"top_k": 5, "max_tokens": 30} and limit == 30
    assert all(str(folder) in source for source in sources.values())
    _, _, limit = resolve(
        model, generation_config=str(folder), override_generation_config={"max_new_tokens": 10}
    )
    assert limit == 10


def test_end_of_text_tokens_are_the_union(model: Path, folder: Path) -> None:
    def eos(**given: Any) -> set[int | None]:
        config = EngineArgs(model=str(model), **given).create_engine_config().model_config
        return {config.eos_token_id, *config.extra_eos_token_ids}

    assert eos() == eos(generation_config="headrace") == {2, 7}
    assert eos(generation_config=str(folder)) == {2, 7, 9}


def test_from_a_gguf_file(smollm2_gguf: Path, tmp_path: Path) -> None:
    values, sources, _ = resolve(smollm2_gguf, override_generation_config={"top_k": 3})
    assert values["top_k"] == 3 and sources["top_k"] == OVERRIDE
    others = {source for name, source in sources.items() if name != "top_k"}
    assert others <= {f"model file {smollm2_gguf.name}"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"override_generation_config": {"temprature": 1}}, "temprature.*did you mean temperature"),
        ({"override_generation_config": {"top_p": 3}}, "override_generation_config: top_p is 3"),
        ({"override_generation_config": {"max_new_tokens": 0}}, "max_new_tokens is 0"),
        ({"generation_config": "nowhere"}, "auto, headrace, or a folder.*nowhere"),
    ],
)
def test_sources_that_cannot_be(given: dict[str, Any], words: str, model: Path) -> None:
    with pytest.raises(ConfigurationError, match=words):
        resolve(model, **given)


def test_a_damaged_folder(model: Path, folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"top_k": "many"}')
    with pytest.raises(ModelFileError, match="top_k is 'many'"):
        resolve(model, generation_config=str(folder))
