"""`bench kernels` at tiny shapes, and that a kernel which computes something else is refused."""

import json
from pathlib import Path

import pytest

from headrace.configs.errors import ConfigurationError
from headrace.frontend.cli.bench import kernels as command
from headrace.kernels import bench
from headrace.kernels.bench.cases import CheckFailed
from headrace.kernels.native import Format, Kind, NativeKernels, load_kernels
from tests.kernels.native_ops import available_isas

pytestmark = pytest.mark.skipif(not available_isas(), reason="no native kernels on this machine")

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 300, "tie_word_embeddings": True,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small buffers, and few calls of each kernel."""
    alternating = bench.alternating_seconds
    monkeypatch.setattr(bench, "alternating_seconds", lambda calls, seconds: alternating(calls, 0))
    monkeypatch.setattr(bench.machine, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(bench.machine, "_PEAK_SECONDS", 1e-4)
    monkeypatch.setattr(bench.machine, "_PAUSE_S", 0.002)
    monkeypatch.setattr(bench.products, "COLD_BYTES", 1 << 18)
    monkeypatch.setattr(bench.attention, "COLD_BYTES", 1 << 18)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.parametrize("isa", available_isas())
def test_everything_is_measured(isa, model, tmp_path, headrace_command, capsys):
    file = tmp_path / "result.json"
    argv = ("--model", model, "--rows", 1, 65, "--threads", 2, "--compare-torch")
    assert headrace_command("bench", "kernels", *argv, "--kernels", isa, "--json", file) == 0
    printed, result = capsys.readouterr().out, json.loads(file.read_text())
    assert result["kernels"] == isa and result["threads"] == 2 and not result["failed"]
    assert len(result["read_rates"]) >= 2 and min(result["read_rates"]) > 0
    formats = bench.supported_formats(load_kernels(isa, 1))
    assert {"BF16", "F16", "F32"} <= {format.name for format in formats}
    measured = result["measured"]
    for format in formats:
        rows = [one for one in measured if one["kernel"] == f"product {format.name}"]
        assert len(rows) == 2 * 5 and all(one["torch_ratio"] > 0 for one in rows)
        assert result["peak_rates"][format.name] > 0
        assert {"qkv 512x256", "gate_up 1024x256"} < {one["shape"] for one in rows}
    for one in measured:
        assert one["seconds"] > 0
        if one["limit"] is not None:
            assert one["limit"] in ("memory", "arithmetic") and one["limit_share"] > 0
    assert {one["kernel"] for one in measured} > {"attention", "norm", "argmax", "draw", "logprobs"}
    assert printed.count("\n") >= len(measured) + 4 and "of limit" in printed


def test_rates_count_what_is_read_and_computed():
    kernels = load_kernels("auto", 1)
    shape = bench.ModelShape("m", 256, 512, 4, 2, 32, 300)
    run = bench.KernelBench(kernels, [shape], [3], [Format.BF16], ["products", "attention"])
    by_shape = {(one.shape, one.num_rows): one for one in run.run()}
    down = by_shape["down 256x512", 3]
    assert down.bytes_rate * down.seconds == pytest.approx(2 * 256 * 512)
    assert down.operations_rate * down.seconds == pytest.approx(2 * 3 * 256 * 512)
    decode = by_shape["decode 64 x 200, 4/2 x 32", 64]
    assert decode.bytes_rate * decode.seconds == pytest.approx(64 * 200 * 2 * 2 * 32 * 2)
    assert decode.operations_rate * decode.seconds == pytest.approx(4 * 64 * 200 * 4 * 32)
    prefill = by_shape["prefill 1024, 4/2 x 32", 1024]
    assert prefill.operations_rate * prefill.seconds == pytest.approx(
        4 * 4 * 32 * sum(range(1, 1025))
    )


def test_a_wrong_kernel_is_not_measured(model, tmp_path, headrace_command, capsys, monkeypatch):
    """Products that leave inputs out, attention of another temperature, other tokens."""
    run, draw = NativeKernels.run, NativeKernels.draw

    def run_wrong(self, ops, step, *span):
        for op in ops:
            op.num_inputs -= 32 * (op.kind == Kind.PRODUCT)
            op.scale *= 1.5
        run(self, ops, step, *span)

    monkeypatch.setattr(NativeKernels, "run", run_wrong)
    monkeypatch.setattr(
        NativeKernels, "draw", lambda *args: [(token + 1) % 300 for token in draw(*args)]
    )
    file = tmp_path / "result.json"
    argv = ("--model", model, "--rows", 1, "--formats", "bf16", "f32", "--json", file)
    assert headrace_command("bench", "kernels", *argv) == 1
    printed, result = capsys.readouterr().out, json.loads(file.read_text())
    failed = {one["kernel"]: one["reason"] for one in result["failed"]}
    assert set(failed) == {"product BF16", "product F32", "attention", "draw"}
    assert {one["kernel"] for one in result["measured"]} == {"norm", "argmax", "logprobs"}
    assert printed.count("FAILED its test and is not measured") == 4
    assert "off by" in failed["product BF16"] and "the reference" in failed["draw"]


def test_a_row_that_depends_on_others_fails_the_check(monkeypatch):
    """However near it is to the truth."""
    run = NativeKernels.run

    def run_wrong(self, ops, step, *span):
        ops[0].eps += 0.02 * (step.num_tokens == 1)
        run(self, ops, step, *span)

    monkeypatch.setattr(NativeKernels, "run", run_wrong)
    with pytest.raises(CheckFailed, match="a row alone: other bits"):
        bench.norm_kernel(load_kernels("auto", 1), [], []).check()


def test_unknown_formats_are_refused():
    with pytest.raises(ConfigurationError, match="--formats q9: the kernels have bf16, f32"):
        command.chosen_formats(["BF16", "q9"], [Format.BF16, Format.F32])
    chosen = command.chosen_formats(["f32"], [Format.BF16, Format.F32])
    assert chosen == [Format.F32]


def test_without_native_kernels(headrace_command, capsys):
    assert headrace_command("bench", "kernels", "--kernels", "reference") == 2
    assert "no native kernels to measure" in capsys.readouterr().err
