"""Weights that are replaced under a worker, and memory that it gives back and takes again."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.configs.config import (
    CacheConfig,
    EngineConfig,
    LoadConfig,
    ModelConfig,
    QuantizationMethod,
    SchedulerConfig,
)
from headrace.configs.engine_args import EngineArgs
from headrace.configs.errors import (
    InsufficientMemoryError,
    InvalidRequestError,
    ModelFileError,
    RequestFailedError,
    WrongStateError,
)
from headrace.workers import weight_update
from headrace.workers.shared_tensors import shared_tensors, write_shared
from headrace.workers.weight_memory import num_weight_bytes, weight_memory
from headrace.workers.worker import Worker
from tests.kernels.native_ops import available_isas
from tests.workers.tiny_gguf import write_llama
from tests.workers.tiny_models import MAX_MODEL_LEN, VOCAB_SIZE, StepDriver, make_reference

PROMPT = list(range(20))


def save(name: str, directory: Path, seed: int | None = None) -> Path:
    """A checkpoint; with a `seed`, of other weights than the model's own."""
    make_reference(name).save_pretrained(directory)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        path = directory / "model.safetensors"
        tensors = load_file(path)
        for tensor in tensors.values():
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
        save_file(tensors, path, {"format": "pt"})
    return directory


def start(path: Path, name: str = "llama", **fields: Any) -> Worker:
    reference = make_reference(name)
    model = ModelConfig(
        model=name, path=str(path), tokenizer_path=str(path), served_model_names=(name,),
        architecture=type(reference).__name__, hf_config=reference.config.to_dict(),
        dtype="float32", max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE, eos_token_id=1,
    )  # fmt: skip
    config = EngineConfig(
        replace(model, **fields),
        CacheConfig(num_blocks=32),
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
    )
    return started(config)


def started(config: EngineConfig) -> Worker:
    worker = Worker(config)
    worker.init_device()
    worker.load_model(lambda phase: None)
    worker.init_kv_cache()
    worker.warm_up()
    assert worker.kv_cache.toucher.wait(30.0)
    return worker


def generate(worker: Worker, name: str = "a") -> list[int]:
    driver = StepDriver(worker.execute_model, worker.kv_cache)
    choice = driver.add(name, PROMPT)
    driver.run({choice: 40})
    driver.finish(choice)
    driver.step({})
    return driver.tokens[choice]


def bits(worker: Worker) -> list[bytes]:
    return [piece.numpy().tobytes() for piece in weight_memory(worker.get_model())]


def commit(worker: Worker, path: str | None = None) -> None:
    worker.prepare_weights()
    worker.commit_weights(path)


@pytest.fixture(params=["reference", *available_isas()[-1:]])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CPU_KERNELS", request.param)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["llama", "llama-biases", "qwen2", "gemma3"])
def test_new_weights_are_those_of_a_cold_start(name: str, tmp_path: Path) -> None:
    """From a path, and tensor by tensor in shared memory, with what is not sent staying."""
    old, new = save(name, tmp_path / "old"), save(name, tmp_path / "new", seed=3)
    cold, worker = start(new, name), start(old, name)
    before, wanted = generate(worker), generate(cold)
    assert before != wanted
    worker.begin_weight_update()
    worker.put_weights_of_path(str(new))
    assert generate(worker) == before, "until the end the old ones serve"
    commit(worker, str(new))
    assert bits(worker) == bits(cold) and generate(worker) == wanted

    tensors = load_file(old / "model.safetensors")
    partly = dict(list(tensors.items())[: len(tensors) // 2])
    worker.begin_weight_update()
    put_shared(worker, partly)
    put_shared(worker, {key: tensors[key] for key in tensors if key not in partly})
    commit(worker)
    assert generate(worker) == before

    worker.begin_weight_update()
    put_shared(worker, load_file(new / "model.safetensors"))
    commit(worker)
    some = next(key for key in tensors if key.endswith("layers.1.self_attn.q_proj.weight"))
    worker.begin_weight_update()
    put_shared(worker, {some: tensors[some]})
    commit(worker)
    mixed = load_file(new / "model.safetensors") | {some: tensors[some]}
    save_file(mixed, new / "model.safetensors", {"format": "pt"})
    assert bits(worker) == bits(start(new, name))
    worker.shutdown()
    cold.shutdown()


def put_shared(worker: Worker, tensors: dict[str, torch.Tensor]) -> None:
    fd = write_shared(list(tensors.values()))
    try:
        worker.put_weights_in_memory(
            f"/proc/{os.getpid()}/fd/{fd}",
            list(tensors),
            [str(tensor.dtype) for tensor in tensors.values()],
            [list(tensor.shape) for tensor in tensors.values()],
        )
    finally:
        os.close(fd)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("quantization", ["none", "int8_per_channel_weight_only"])
@pytest.mark.usefixtures("kernels")
def test_tensors_are_packed_as_at_the_start(
    dtype: str, quantization: QuantizationMethod, tmp_path: Path
) -> None:
    old, new = save("llama", tmp_path / "old"), save("llama", tmp_path / "new", seed=3)
    fields: dict[str, Any] = {"dtype": dtype, "quantization": quantization}
    cold, worker = start(new, **fields), start(old, **fields)
    worker.begin_weight_update()
    put_shared(worker, load_file(new / "model.safetensors"))
    commit(worker)
    assert bits(worker) == bits(cold)


def test_a_failed_update_leaves_every_bit(tmp_path: Path) -> None:
    old, new = save("llama", tmp_path / "old"), save("llama", tmp_path / "new", seed=3)
    worker = start(old)
    before, tokens = bits(worker), generate(worker)
    tensors = load_file(new / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    for wrong, error in (
        ({"no.such.weight": torch.ones(2)}, InvalidRequestError),
        ({name: torch.ones(3, 3)}, InvalidRequestError),
    ):
        worker.begin_weight_update()
        put_shared(worker, tensors)
        with pytest.raises(error):
            put_shared(worker, wrong)
        worker.rollback_weights()
        assert bits(worker) == before and generate(worker) == tokens
    data = (new / "model.safetensors").read_bytes()
    (new / "model.safetensors").write_bytes(data[: len(data) // 2])
    worker.begin_weight_update()
    with pytest.raises(ModelFileError):
        worker.put_weights_of_path(str(new))
    worker.rollback_weights()
    worker.rollback_weights()
    with pytest.raises(WrongStateError):
        worker.prepare_weights()
    assert bits(worker) == before and generate(worker) == tokens


def test_a_checkpoint_of_another_size_is_refused(tmp_path: Path) -> None:
    worker = start(save("llama", tmp_path / "old"))
    worker.begin_weight_update()
    with pytest.raises(ModelFileError):
        worker.put_weights_of_path(str(save("llama-biases", tmp_path / "other")))


def test_two_sets_must_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save("llama", tmp_path)
    worker = start(path)
    facts = replace(weight_update.cpu_facts(), memory_available=1000)
    monkeypatch.setattr(weight_update, "cpu_facts", lambda: facts)
    worker.begin_weight_update()
    with pytest.raises(InsufficientMemoryError, match="level 2"):
        worker.put_weights_of_path(str(path))


def test_gguf_weights_are_replaced_by_a_gguf_file(tmp_path: Path) -> None:
    types = [{"": "Q4_0"}, {"": "Q8_0"}]
    paths = [
        write_llama(tmp_path / f"{std}.gguf", types if std < 0.5 else types[::-1], std=std)
        for std in (0.4, 0.8)
    ]
    cold, worker = (
        started(replace(config, cache_config=CacheConfig(num_blocks=32)))
        for config in (EngineArgs(str(path)).create_engine_config() for path in reversed(paths))
    )
    worker.begin_weight_update()
    with pytest.raises(InvalidRequestError, match=r"\.gguf"):
        put_shared(worker, {"model.norm.weight": torch.ones(2)})
    with pytest.raises(InvalidRequestError, match=r"\.gguf"):
        worker.put_weights_of_path(str(tmp_path))
    worker.put_weights_of_path(str(paths[1]))
    commit(worker, str(paths[1]))
    assert bits(worker) == bits(cold)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("how", ["file", "spilled", "changed file", "tensors"])
def test_level_1_brings_the_same_bits_back(how: str, tmp_path: Path) -> None:
    path = save("gemma3", tmp_path / "model")
    worker = start(path, "gemma3")
    if how == "tensors":
        worker.begin_weight_update()
        put_shared(worker, load_file(path / "model.safetensors"))
        commit(worker)
    tokens, before = generate(worker), bits(worker)
    if how == "changed file":
        save("gemma3", path, seed=5)
    worker.release_kv_cache()
    worker.release_weights(1, how != "spilled")
    assert (worker._weights_state == "readable") == (how == "file")
    assert worker.restore_weights()
    worker.restore_kv_cache()
    assert bits(worker) == before and generate(worker) == tokens
    worker.shutdown()


def test_a_file_that_changes_during_sleep_is_noticed(tmp_path: Path) -> None:
    path = save("llama", tmp_path / "model")
    worker = start(path)
    worker.release_weights(1, True)
    save("llama", path, seed=5)
    with pytest.raises(ModelFileError, match="has changed"):
        worker.restore_weights()
    worker.begin_weight_update()
    worker.put_weights_of_path(str(path))
    commit(worker, str(path))
    assert worker.restore_weights() and bits(worker) == bits(start(path))


def test_level_2_waits_for_weights(tmp_path: Path) -> None:
    path = save("llama", tmp_path / "model")
    worker = start(path)
    before = bits(worker)
    worker.release_weights(2, True)
    assert not worker.restore_weights()
    worker.begin_weight_update()
    put_shared(worker, {"model.norm.weight": torch.ones(48)})
    with pytest.raises(WrongStateError, match="were not sent"):
        worker.prepare_weights()
    worker.rollback_weights()
    worker.reload_weights()
    assert bits(worker) == before and worker.restore_weights()
    worker.begin_weight_update()
    put_shared(worker, load_file(path / "model.safetensors"))
    commit(worker)
    with pytest.raises(WrongStateError, match="no file"):
        worker.reload_weights()


def test_a_full_disk_leaves_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, data: object) -> int:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            pass

    worker = start(save("llama", tmp_path / "model"))
    before = bits(worker)
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **options: Full())
    with pytest.raises(RequestFailedError, match="--sleep-spill-dir"):
        worker.release_weights(1, False)
    assert worker._weights_state == "loaded" and bits(worker) == before


def rss_anon() -> int:
    """Bytes of private memory that this process has pages for."""
    [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in x]
    return int(line.split()[1]) << 10


@pytest.fixture
def large() -> Iterator[Worker]:
    """Random weights, tens of MiB, and as much cache, all of it touched."""
    hf_config = make_reference("llama").config.to_dict() | {
        "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 4, "head_dim": 64,
        "vocab_size": 8000, "num_attention_heads": 6, "num_key_value_heads": 6,
    }  # fmt: skip
    model = ModelConfig(
        model="m", path="m", tokenizer_path="m", served_model_names=("m",),
        architecture="LlamaForCausalLM", hf_config=hf_config, dtype="float32",
        max_model_len=MAX_MODEL_LEN, vocab_size=8000, eos_token_id=1,
    )  # fmt: skip
    config = EngineConfig(
        model,
        CacheConfig(kv_cache_memory_bytes=32 << 20),
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        load_config=LoadConfig("dummy"),
    )
    worker = started(config)
    worker.kv_cache.pool.add_(0)  # whatever the system offers for touching
    yield worker
    worker.shutdown()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("level", "may_read_again"), [(1, True), (1, False), (2, True)])
def test_sleep_gives_memory_back(large: Worker, level: int, may_read_again: bool) -> None:
    tokens, before = generate(large), rss_anon()
    total = num_weight_bytes(large.get_model()) + large.kv_cache.num_bytes
    assert total > 60 << 20
    large.release_kv_cache()
    large.release_weights(level, may_read_again)
    freed = before - rss_anon()
    assert freed >= 0.9 * total, f"{freed / total:.3f} of {total} bytes are free"
    if not large.restore_weights():
        large.reload_weights()
    large.restore_kv_cache()
    assert not large.kv_cache.pool.any()
    assert generate(large) == tokens


@pytest.mark.parametrize(
    ("path", "text"),
    [("/etc/passwd", "no shared memory"), ("/dev/shm/../etc", "no shared memory"),
     ("/proc/1/fd/0", "no shared memory"), ("/dev/shm/headrace-none", "cannot be read")],
)  # fmt: skip
def test_only_shared_memory_is_mapped(path: str, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        list(shared_tensors(path, ["a"], [torch.float32], [[2]]))


def test_shared_tensors_come_as_they_were() -> None:
    tensors = [torch.randn(3, 5), torch.randn(7).bfloat16(), torch.randn(1, 2, 3).half().double()]
    fd = write_shared(tensors)
    path = f"/proc/{os.getpid()}/fd/{fd}"
    dtypes, shapes = [t.dtype for t in tensors], [list(t.shape) for t in tensors]
    found = [tensor for _, tensor in shared_tensors(path, ["a", "b", "c"], dtypes, shapes)]
    assert all(map(torch.equal, found, tensors))
    with pytest.raises(InvalidRequestError, match="bytes"):
        list(shared_tensors(path, ["a"], [torch.float64], [[1000]]))
    os.close(fd)
