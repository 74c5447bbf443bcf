"""The worker from files to steps: start-up, memory budget, warm-up."""

import logging
from dataclasses import replace
from pathlib import Path

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
from headrace.configs.errors import ConfigurationError, InsufficientMemoryError, ModelFileError
from headrace.configs.hardware import CpuFacts, cpu_facts
from headrace.workers import worker as worker_module
from headrace.workers.kv_cache import choose_cache_dtype
from headrace.workers.protocol import WorkerInfo
from headrace.workers.worker import Worker
from tests.kernels.native_ops import available_isas
from tests.workers.tiny_gguf import write_llama
from tests.workers.tiny_models import (
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    StepDriver,
    assert_greedy,
    make_reference,
)

MIB = 1 << 20


def save(name: str, directory: Path) -> EngineConfig:
    reference = make_reference(name)
    reference.save_pretrained(directory)
    return EngineConfig(
        ModelConfig(
            model=name,
            path=str(directory),
            tokenizer_path=str(directory),
            served_model_names=(name,),
            architecture=type(reference).__name__,
            hf_config=reference.config.to_dict(),
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            eos_token_id=1,
        ),
        scheduler_config=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
    )


def start(config: EngineConfig) -> tuple[Worker, WorkerInfo]:
    worker = Worker(config)
    worker.init_device()
    phases: list[str] = []
    worker.load_model(phases.append)
    info = worker.init_kv_cache()
    worker.warm_up()
    return worker, info


def available(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    facts = cpu_facts()
    small: CpuFacts = replace(facts, memory_available=num_bytes)
    monkeypatch.setattr(worker_module, "cpu_facts", lambda: small)


@pytest.mark.parametrize("name", ["llama-tied", "mistral", "gemma3"])
def test_serves_a_saved_model(name: str, tmp_path: Path) -> None:
    worker, info = start(save(name, tmp_path))
    assert worker.kv_cache.toucher.wait(30.0)
    assert not worker.kv_cache.pool.any()  # the warm-up left nothing
    driver = StepDriver(worker.execute_model, worker.kv_cache)
    choice = driver.add("a", list(range(50)))
    driver.run({choice: 70}, chunk=30)
    assert_greedy(make_reference(name), driver.tokens[choice], 50)
    worker.shutdown()
    library = f"torch-{torch.__version__}-float32-kv-float32-"
    if available_isas():
        assert info.contract_id.startswith("native-4-") and f"-{library}" in info.contract_id
    else:
        assert info.contract_id.startswith(f"{library}reference-")
    assert info.num_threads == cpu_facts().num_threads
    assert set(info.phases) == {"size memory", "load weights", "warm up"}


@pytest.mark.skipif(not available_isas(), reason="no native kernels on this machine")
def test_kernels_are_chosen_by_type_and_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = save("gemma3", tmp_path)
    narrow = replace(config, model_config=replace(config.model_config, dtype="bfloat16"))
    for choice in available_isas():
        monkeypatch.setenv("HEADRACE_CPU_KERNELS", choice)
        worker, info = start(narrow)
        families = {"avx512vnni": "avx512", "amx": "avx512", "neondotprod": "neon"}
        family = families.get(choice, choice)
        library = f"torch-{torch.__version__}-bfloat16-kv-bfloat16-"
        assert info.contract_id.startswith(f"native-4-{family}-{library}")
        assert worker.kv_cache.toucher.wait(30.0)
        assert not worker.kv_cache.pool.any()  # the warm-up left nothing
    monkeypatch.setenv("HEADRACE_CPU_KERNELS", "reference")
    _, info = start(narrow)
    assert info.contract_id.startswith(f"torch-{torch.__version__}-bfloat16-kv-bfloat16-reference-")
    monkeypatch.setenv("HEADRACE_CPU_KERNELS", "sse")
    with pytest.raises(ConfigurationError, match="'sse' do not exist"):
        start(narrow)


def quantized(config: EngineConfig, method: QuantizationMethod) -> EngineConfig:
    model_config = replace(config.model_config, dtype="bfloat16", quantization=method)
    return replace(config, model_config=model_config)


def gguf_config(path: Path) -> EngineConfig:
    config = EngineArgs(model=str(path), max_num_seqs=4).create_engine_config()
    return quantized(config, "gguf")


@pytest.mark.skipif(not available_isas(), reason="no native kernels on this machine")
def test_weights_are_kept_as_they_are_in_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    types = {"": "Q4_1", "ffn_up": "Q5_K"}  # gate and up are one product
    path = write_llama(tmp_path / "a.gguf", [types, {"": "Q4_K"}])
    _, info = start(gguf_config(path))
    assert f"-torch-{torch.__version__}-bfloat16-gguf-" in info.contract_id
    found = [line for line in caplog.messages if line.startswith("weights:")]
    assert found == ["weights: 1.1 MiB, gguf (Q4_K 7, Q4_1 5, BF16 2, Q8_0 1)"]
    assert "2 matrices are kept in bfloat16: there is no kernel" in caplog.text
    assert info.memory["weights"] - 1.1 * MIB < 0.2 * MIB  # rotary tables are the rest


@pytest.mark.parametrize("method", ("int8_per_channel_weight_only", "gguf"))
def test_quantization_on_torch(
    method: QuantizationMethod,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("HEADRACE_CPU_KERNELS", "reference")
    caplog.set_level("INFO")
    path = write_llama(tmp_path / "a.gguf", [{"": "Q4_1"}])
    config = quantized(gguf_config(path), method)
    _, info = start(config)
    plain = start(quantized(config, "none"))[1]
    library = f"torch-{torch.__version__}-bfloat16"
    assert info.contract_id.startswith(f"{library}-{method}-kv-bfloat16-reference-")
    assert plain.contract_id.startswith(f"{library}-kv-bfloat16-reference-")
    assert info.memory["weights"] == plain.memory["weights"]
    assert f"{method} (bfloat16 8)" in caplog.text
    assert "quantized weights are dequantized into bfloat16" in caplog.text


@pytest.mark.skipif(not available_isas(), reason="no native kernels on this machine")
def test_random_weights_in_8_bits(tmp_path: Path) -> None:
    config = quantized(save("llama", tmp_path), "int8_per_channel_weight_only")
    (tmp_path / "model.safetensors").unlink()
    _, info = start(replace(config, load_config=LoadConfig("dummy")))
    assert "-bfloat16-int8_per_channel_weight_only-" in info.contract_id


@pytest.mark.skipif(not available_isas(), reason="no native kernels on this machine")
def test_an_int8_cache_takes_half_the_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = save("gemma3", tmp_path)
    config = replace(config, model_config=replace(config.model_config, dtype="bfloat16"))
    wide = start(config)[1].kv_cache_spec
    config = replace(config, cache_config=CacheConfig(kv_cache_dtype="int8"))
    with caplog.at_level(logging.INFO):
        worker, info = start(config)
    spec = info.kv_cache_spec
    # One byte per value instead of two, and four for the scale of each of a head's 8 values.
    assert spec.block_bytes == wide.block_bytes * 12 // 16
    assert worker.kv_cache.pool.nbytes == spec.block_bytes * info.num_blocks
    assert info.memory["KV cache"] == worker.kv_cache.pool.nbytes
    assert "KV cache: int8, " in caplog.text
    assert "-bfloat16-kv-int8-" in info.contract_id
    assert worker.kv_cache.toucher.wait(30.0)
    assert not worker.kv_cache.pool.any()  # the warm-up left nothing, and the scales are zeroed too


def test_a_cache_that_attention_cannot_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CPU_KERNELS", "reference")
    config = replace(save("llama", tmp_path), cache_config=CacheConfig(kv_cache_dtype="int8"))
    with pytest.raises(ConfigurationError, match=r"kv_cache_dtype int8 .* on torch kernels"):
        start(config)
    for name in ("bfloat16", "float32"):
        assert choose_cache_dtype("auto", getattr(torch, name), False) is getattr(torch, name)
    assert choose_cache_dtype("float16", torch.float32, True) is torch.float16
    with pytest.raises(ConfigurationError, match="choose auto or one of bfloat16, int8"):
        choose_cache_dtype("float32", torch.bfloat16, True)


def test_memory_is_accounted_for(tmp_path: Path) -> None:
    config = save("gemma3", tmp_path)
    _, info = start(config)
    # 4 sequences of 256 tokens in 16 blocks, in each of the groups, and the null block.
    num_groups = len(info.kv_cache_spec.groups)
    assert num_groups == 7
    assert info.num_blocks == 4 * 16 * num_groups + 1
    memory = dict(info.memory)
    assert memory["KV cache"] == info.num_blocks * info.kv_cache_spec.block_bytes
    assert memory.pop("available") == sum(memory.values())


def test_explicit_sizes_win(tmp_path: Path) -> None:
    config = save("llama", tmp_path)
    _, info = start(replace(config, cache_config=CacheConfig(num_blocks=12, block_size=4)))
    assert info.num_blocks == 12
    block_bytes = info.kv_cache_spec.block_bytes
    cache = CacheConfig(kv_cache_memory_bytes=5 * block_bytes + 1, block_size=4)
    _, info = start(replace(config, cache_config=cache))
    assert info.num_blocks == 5


def test_default_takes_at_most_two_fifths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = save("llama", tmp_path)
    config = replace(config, scheduler_config=SchedulerConfig(1000, 64))
    available(monkeypatch, 20 * MIB)
    _, info = start(config)
    left = 20 * MIB - info.memory["weights"] - info.memory["activations (at most)"]
    assert 0.39 * left < info.memory["KV cache"] <= 0.4 * left


def test_too_little_memory_for_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch, 250_000)
    with pytest.raises(InsufficientMemoryError, match=r"weights need .* MiB .* short.*bfloat16"):
        start(save("llama", tmp_path))
    path = write_llama(tmp_path / "a.gguf", [{"": "Q4_1"}])
    with pytest.raises(InsufficientMemoryError, match="MiB in bfloat16 with quantization gguf"):
        start(gguf_config(path))


def test_too_little_memory_for_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = save("llama", tmp_path)
    cache = CacheConfig(kv_cache_memory_bytes=10)
    with pytest.raises(InsufficientMemoryError, match="--kv-cache-memory 12288 would start"):
        start(replace(config, cache_config=cache))
    cache = CacheConfig(num_blocks=1)
    with pytest.raises(InsufficientMemoryError, match="--num-gpu-blocks-override 2 would start"):
        start(replace(config, cache_config=cache))
    available(monkeypatch, 8 * MIB)
    cache = CacheConfig(kv_cache_memory_bytes=64 * MIB)
    with pytest.raises(InsufficientMemoryError, match=r"--kv-cache-memory 67108864 asks .* left"):
        start(replace(config, cache_config=cache))


@pytest.mark.parametrize("num_blocks", [2, 3])
def test_smallest_cache_starts_and_warms_up(num_blocks: int, tmp_path: Path) -> None:
    config = save("llama", tmp_path)
    cache = CacheConfig(num_blocks=num_blocks, block_size=1)
    _, info = start(replace(config, cache_config=cache))
    assert info.num_blocks == num_blocks


def test_incomplete_checkpoints_are_refused(tmp_path: Path) -> None:
    config = save("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("model.layers.1.self_attn.v_proj.weight")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelFileError, match=r"model\.layers\.1\.self_attn\.v_proj\.weight"):
        start(config)


def test_denormals_are_flushed_on_every_thread(tmp_path: Path) -> None:
    start(save("llama", tmp_path))
    tiny = torch.full((1 << 20,), 1e-39)
    assert not (tiny * 0.5).any()
