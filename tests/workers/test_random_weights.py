"""Random weights: every name and shape of the model, repeatable, and a model that runs on them."""

import json
from pathlib import Path

import pytest
import torch

from headrace.configs.engine_args import EngineArgs
from headrace.workers.random_weights import random_weights
from headrace.workers.worker import Worker
from tests.workers.tiny_models import StepDriver, make_reference


def write_config(name: str, directory: Path) -> None:
    model = make_reference(name)
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    (directory / "config.json").write_text(json.dumps(config, default=str))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_weights_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    write_config(name, tmp_path)
    config = EngineArgs(model=str(tmp_path)).create_engine_config().model_config
    weights = dict(random_weights(tmp_path, config.hf_config, torch.bfloat16))
    expected = make_reference(name).state_dict()
    if config.hf_config["tie_word_embeddings"]:
        expected.pop("lm_head.weight")
    assert {key: value.shape for key, value in weights.items()} == {
        key: value.shape for key, value in expected.items()
    }
    assert all(weight.dtype == torch.bfloat16 for weight in weights.values())
    again = dict(random_weights(tmp_path, config.hf_config, torch.bfloat16))
    assert all(torch.equal(again[key], weight) for key, weight in weights.items())


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_model_without_a_checkpoint_runs(name: str, tmp_path: Path) -> None:
    write_config(name, tmp_path)
    args = EngineArgs(
        model=str(tmp_path), load_format="dummy", dtype="float32", kv_cache_memory_bytes=1 << 20,
        max_num_seqs=4, max_num_batched_tokens=64,
    )  # fmt: skip
    worker = Worker(args.create_engine_config())
    worker.init_device()
    worker.load_model(lambda phase: None)
    worker.init_kv_cache()
    worker.warm_up()
    driver = StepDriver(worker.execute_model, worker.kv_cache)
    choice = driver.add("a", list(range(20)))
    driver.run({choice: 24})
    assert len(driver.tokens[choice]) == 24
    worker.shutdown()
