"""One small run of each benchmark on the real model, and the terminal clients beside them."""

import io
import json
import sys
from pathlib import Path

import pytest

from headrace.frontend.cli.main import main
from tests.e2e.server_process import ServerProcess

pytestmark = pytest.mark.slow
SMALL = (
    *("--max-model-len", "256", "--kv-cache-memory-bytes", "128M", "--max-num-seqs", "4"),
    *("--max-num-batched-tokens", "64", "--disable-tqdm"),
)


def run(capsys: pytest.CaptureFixture[str], file: Path, *argv: object) -> tuple[str, dict]:
    """Printed text and JSON of a benchmark that succeeds."""
    assert main(["bench", *map(str, argv), "--json", str(file)]) == 0
    return capsys.readouterr().out, json.loads(file.read_text())


def test_latency(smollm2_gguf, tmp_path, capsys):
    printed, result = run(
        capsys, tmp_path / "r.json", "latency", smollm2_gguf, *SMALL, "--input-len", 8,
        "--output-len", 4, "--batch-size", 2, "--num-iters", 3, "--num-iters-warmup", 1,
    )  # fmt: skip
    assert len(result["latencies"]) == 3 and result["avg_latency"] > 0
    assert set(result["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    assert result["avg_step_cpu_time_front_end"] > 0
    assert "time per step (ms)" in printed


def test_profile_of_steps_in_another_process(smollm2_gguf, tmp_path, capsys):
    printed, result = run(
        capsys, tmp_path / "r.json", "latency", smollm2_gguf, *SMALL, "--input-len", 8,
        "--output-len", 6, "--batch-size", 2, "--num-iters-warmup", 1, "--profile",
    )  # fmt: skip
    phases = result["phases"]
    assert min(phases["encode messages"], phases["decode messages"]) > 0
    assert phases["whole step"] > phases["model step"] > phases["layers"] > 0
    assert "whole step" in printed
    if result["operations"] is not None:
        assert result["operations"]["gate_up"]["calls"] == 30


def test_throughput_of_both_engines(smollm2_gguf, tmp_path, capsys):
    for engine in ((), ("--async-engine",)):
        printed, result = run(
            capsys, tmp_path / "r.json", "throughput", smollm2_gguf, *SMALL, *engine,
            "--num-prompts", 5, "--input-len", 8, "--output-len", 4, "--num-warmups", 1, "--n", 2,
        )  # fmt: skip
        assert result["num_requests"] == 5
        assert (result["total_input_tokens"], result["total_output_tokens"]) == (40, 40)
        assert result["total_num_tokens"] == 80
        assert "output tokens/s" in printed


def test_startup(smollm2_gguf, tmp_path, capsys):
    printed, result = run(
        capsys, tmp_path / "r.json", "startup", smollm2_gguf, *SMALL, "--num-iters-cold", 1,
        "--num-iters-warmup", 0, "--num-iters-warm", 1,
    )  # fmt: skip
    for kind in ("cold", "warm"):
        assert len(result[kind]["ready_s"]) == 1
        phases = result[kind]["phases_s"][0]
        assert {"import torch", "load weights"} <= set(phases)
        # PP01: the phases account for at least 95 % of the time; 0.1 s is one poll and rounding.
        assert sum(phases.values()) > 0.95 * result[kind]["ready_s"][0] - 0.1
    assert "ready, as a client sees it" in printed


def test_serve(server: ServerProcess, tmp_path, capsys):
    printed, result = run(
        capsys, tmp_path / "r.json", "serve", "--base-url", server.url, "--num-prompts", 6,
        "--num-warmups", 1, "--input-len", 20, "--output-len", 5, "--max-concurrency", 3,
        "--ignore-eos", "--disable-tqdm", "--save-detailed", "--ready-check-timeout-sec", 30,
    )  # fmt: skip
    assert result["completed"] == 6 and result["failed"] == 0
    assert result["output_lens"] == [5] * 6 and result["input_lens"] == [20] * 6
    assert result["requested_input_tokens"] == result["total_input_tokens"] == 120
    assert result["num_shorter_outputs"] == 0 and result["cache_hit_share"] == 0
    assert result["max_concurrent_requests"] <= 3
    # The server's clock starts later and ends earlier than the client's.
    clocks = result["server_mean_ms"]
    assert 0 < clocks["ttft"] <= result["mean_ttft_ms"]
    assert 0 < clocks["e2el"] <= result["mean_e2el_ms"] * 1.01
    assert "means by both clocks" in printed


def test_serve_sees_the_prefix_cache(server: ServerProcess, tmp_path, capsys):
    _, result = run(
        capsys, tmp_path / "r.json", "serve", "--base-url", server.url, "--num-prompts", 4,
        "--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", 1,
        "--prefix-repetition-prefix-len", 64, "--prefix-repetition-suffix-len", 4,
        "--output-len", 2, "--max-concurrency", 1, "--disable-tqdm",
    )  # fmt: skip
    assert result["cache_hit_share"] == pytest.approx(3 / 4 * 64 / 68, abs=0.02)


def test_serve_over_the_chat_route(server: ServerProcess, tmp_path, capsys):
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "Say hello.", "output_tokens": 4}\n')
    _, result = run(
        capsys, tmp_path / "r.json", "serve", "--base-url", server.url, "--num-prompts", 2,
        "--backend", "openai-chat", "--dataset-name", "custom", "--dataset-path", data,
        "--temperature", 0, "--ignore-eos", "--disable-tqdm", "--save-detailed",
    )  # fmt: skip
    assert result["output_lens"] == [4, 4]
    assert result["generated_texts"][0] == result["generated_texts"][1] != ""


def test_chat_on_an_engine_of_its_own(smollm2_gguf, capsys):
    argv = ("chat", str(smollm2_gguf), *SMALL[:-1], "--stats", "--temperature", "0")
    question = "What is the capital of France? Answer in one sentence."
    assert main([*argv, "-q", question, "--max-tokens", "24"]) == 0
    printed = capsys.readouterr()
    assert "Paris" in printed.out and "a second]" in printed.err


def test_complete_on_an_engine_of_its_own(smollm2_gguf, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once upon a time\nOnce upon a time\n"))
    argv = ("complete", str(smollm2_gguf), *SMALL[:-1], "--max-tokens", "8", "--seed", "1")
    assert main([*argv, "--temperature", "1", "--top-p", "0.99"]) == 0
    printed = capsys.readouterr().out
    half = len(printed) // 2
    assert printed[:half] == printed[half:] and printed.strip()
