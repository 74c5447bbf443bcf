"""`bench latency --profile` on a tiny model: phases, and what each operation read and computed."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.configs.config import CacheConfig
from headrace.frontend.cli.bench.step_timer import WHOLE, StepTimer, medians
from headrace.frontend.cli.main import main
from tests.e2e.tiny_model import save_tiny_model
from tests.kernels.native_ops import available_isas

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2, 32, 48, 4, 2, 8, 272
PROMPT, OUTPUT = 8, 5
BF16 = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def profile(
    model: Path,
    kernels: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    *options: str,
) -> dict[str, Any]:
    monkeypatch.setenv("HEADRACE_CPU_KERNELS", kernels)
    monkeypatch.setenv("HEADRACE_MULTIPROCESSING", "0")
    file = tmp_path / "profile.json"
    argv = (
        "bench", "latency", str(model), "--dtype", "bfloat16", "--num-gpu-blocks-override", "64",
        "--input-len", str(PROMPT), "--num-iters-warmup", "1", "--profile", "--disable-tqdm",
        "--json", str(file), *options,
    )  # fmt: skip
    assert main(argv) == 0
    result: dict[str, Any] = json.loads(file.read_text())
    return result


@pytest.mark.skipif(not available_isas(), reason="no native kernels on this machine")
def test_operations_of_decoding_steps(model, monkeypatch, tmp_path, capsys):
    options = ("--batch-size", "1", "--output-len", str(OUTPUT))
    result = profile(model, "auto", monkeypatch, tmp_path, *options)
    phases, ops = result["phases"], result["operations"]
    assert set(ops) == {"qkv", "attention", "o", "gate_up", "down", "head"}
    for name, op in ops.items():
        assert op["calls"] == (1 if name == "head" else LAYERS) and op["seconds"] > 0
    # The first token comes with the prompt; each later one sees itself and all before it.
    contexts = [PROMPT + i for i in range(1, OUTPUT)]
    mean = sum(contexts) / len(contexts)
    assert ops["attention"]["num_bytes"] == LAYERS * mean * 2 * KV_HEADS * HEAD_DIM * BF16
    assert ops["attention"]["num_operations"] == LAYERS * mean * 4 * HEADS * HEAD_DIM
    assert ops["gate_up"]["num_bytes"] == LAYERS * 2 * INNER * HIDDEN * BF16
    assert ops["gate_up"]["num_operations"] == LAYERS * 2 * 2 * INNER * HIDDEN
    assert ops["head"]["num_operations"] == 2 * VOCAB * HIDDEN
    in_turn = ("schedule", "model step", "take results", "rest of the step loop")
    assert sum(phases[name] for name in in_turn) == pytest.approx(phases[WHOLE], rel=0.3)
    inner = ("prepare inputs", "layers", "head", "sample")
    assert 0 < sum(phases[name] for name in inner) < phases["model step"] * 1.3
    assert phases["process outputs"] > 0
    printed = capsys.readouterr().out
    assert "share (%)" in printed and "gate_up" in printed and "GFLOP/s" in printed


@pytest.mark.skipif(not available_isas(), reason="no native kernels on this machine")
def test_operations_of_prompts(model, monkeypatch, tmp_path):
    result = profile(model, "auto", monkeypatch, tmp_path, "--batch-size", "3", "--output-len", "1")
    ops = result["operations"]
    num_pairs = PROMPT * (PROMPT + 1) // 2
    assert ops["attention"]["num_operations"] == 3 * LAYERS * num_pairs * 4 * HEADS * HEAD_DIM
    assert ops["attention"]["num_bytes"] == 3 * LAYERS * PROMPT * 2 * KV_HEADS * HEAD_DIM * BF16
    assert result["phases"]["layers"] > 0


def test_torch_kernels_have_phases_only(model, monkeypatch, tmp_path, capsys):
    options = ("--batch-size", "2", "--output-len", str(OUTPUT))
    result = profile(model, "reference", monkeypatch, tmp_path, *options)
    assert result["operations"] is None and result["phases"]["layers"] > 0
    assert "kernels are torch's" in capsys.readouterr().out


class Clock:
    """Stands in for the clock of the timer."""

    now = 100.0


def test_the_timer_adds_up_step_by_step(monkeypatch):
    """Steps that do not count are left out, the last one is, and the methods come back."""
    from headrace.frontend.cli.bench import step_timer

    clock = Clock()
    monkeypatch.setattr(step_timer.time, "perf_counter", lambda: clock.now)

    def step(self, seconds):
        clock.now += seconds

    here = "headrace.configs.config:CacheConfig"
    monkeypatch.setattr(CacheConfig, "step", step, raising=False)
    monkeypatch.setattr(CacheConfig, "part", step, raising=False)
    phases = {"model": (f"{here}.step",), "part": (f"{here}.part",)}
    timer = StepTimer(phases, f"{here}.step", lambda self, seconds: seconds < 5)
    config = CacheConfig()
    for seconds in (7, 1, 3, 4):
        config.step(seconds)
        config.part(0.5)
        config.part(0.25)
        clock.now += 1
    steps = timer.stop()
    assert steps == [
        {"model": 1, "part": 0.75, WHOLE: 2.75},
        {"model": 3, "part": 0.75, WHOLE: 4.75},
    ]
    assert CacheConfig.step is step
    assert medians([*steps, {"model": 5.0}]) == {"model": 3, "part": 0.75, WHOLE: 2.75}
