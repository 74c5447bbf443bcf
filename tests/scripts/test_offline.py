"""`scripts/bench/offline.py`: workloads, what peers answer, ratios and the memory's limit."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPTS = Path(__file__).parent.parent.parent / "scripts" / "bench"
# As llama-batched-bench prints them, with -npp 32,1024 -ntg 128,1 -npl 8,1.
LLAMA_LINES = """
{"n_kv_max": 2048, "n_batch": 2048, "n_ubatch": 512, "flash_attn": -1, "is_pp_shared": 0, \
"n_gpu_layers": -1, "n_threads": 2, "n_threads_batch": 2, "pp": 32, "tg": 128, "pl": 8, \
"n_kv": 1280, "t_pp": 0.500000, "speed_pp": 512.0, "t_tg": 7.500000, "speed_tg": 136.533, \
"t": 8.000000, "speed": 160.0}
{"n_kv_max": 2048, "n_batch": 2048, "n_ubatch": 512, "flash_attn": -1, "is_pp_shared": 0, \
"n_gpu_layers": -1, "n_threads": 2, "n_threads_batch": 2, "pp": 1024, "tg": 1, "pl": 1, \
"n_kv": 1025, "t_pp": 2.500000, "speed_pp": 409.6, "t_tg": 0.020000, "speed_tg": 50.0, \
"t": 2.520000, "speed": 406.7}
"""
# A module that looks like vLLM, and logs to stdout as it does.
VLLM = """
from types import SimpleNamespace
__version__ = "0.32.0"
class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos):
        assert temperature == 0.0 and ignore_eos
        self.max_tokens = max_tokens
class LLM:
    def __init__(self, model, dtype, max_model_len):
        print("INFO 11-30 05:07:31 [config.py] model", model, dtype)
    def generate(self, inputs, params, use_tqdm):
        print("INFO generating")
        choice = SimpleNamespace(token_ids=list(range(params.max_tokens)))
        assert [one["prompt_token_ids"] for one in inputs] == [[5, 6], [7, 8]]
        return [SimpleNamespace(outputs=[choice]) for _ in inputs]
"""


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    """Import a script that lies beside others."""
    monkeypatch.syspath_prepend(str(SCRIPTS))

    def load(name: str) -> ModuleType:
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return load


def test_workloads(load):
    workload = load("offline_engines").Workload
    decode, prefill = workload.parse("8x32+128"), workload.parse("1x1024+1")
    assert (decode.batch, decode.num_prompt, decode.num_output) == (8, 32, 128)
    assert decode.name == "batch 8, 32 in, 128 out" and decode.num_counted == 8 * 128
    assert prefill.name == "prefill 1 x 1024" and prefill.num_counted == 1024
    for text in ("8", "8x32", "x+", "0x1+1", "1x1+0", "8x32+128+1"):
        with pytest.raises(ValueError):
            workload.parse(text)


def test_lines_of_llama_cpp(load):
    engines = load("offline_engines")
    parse, workload = engines.parse_batched_bench, engines.Workload
    text = "some log\n" + LLAMA_LINES
    assert parse(text, workload(8, 32, 128)) == {"seconds": 8.0, "num_tokens": 1024}
    # A prefill ends with the prompts.
    assert parse(text, workload(1, 1024, 1)) == {"seconds": 2.5, "num_tokens": 1}
    with pytest.raises(SystemExit, match="no line for batch 1, 32 in, 128 out"):
        parse(text, workload(1, 32, 128))
    with pytest.raises(SystemExit, match="no line"):
        parse("failed to load model\n[1]\n", workload(8, 32, 128))


def test_the_command_for_llama_cpp(load, tmp_path):
    """A tool that prints what it was called with, as numbers of its line."""
    engines = load("offline_engines")
    tool, file = tmp_path / "llama-batched-bench", tmp_path / "m-q4_0.gguf"
    file.write_bytes(b"12345")
    tool.write_text(
        f"#!{sys.executable}\nimport json, sys\n"
        "a = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
        "assert a['-m'].endswith('m-q4_0.gguf') and a['-t'] == '2' and a['-c'] == '80', a\n"
        "assert a['--output-format'] == 'jsonl'\n"
        "n = {k: int(a[f'-n{k}']) for k in ('pp', 'tg', 'pl')}\n"
        "print(json.dumps(n | {'t_pp': 1.0, 't_tg': 2.0, 't': 3.0}))\n"
    )
    tool.chmod(0o755)
    engine = engines.LlamaEngine(tool, file, 2)
    assert engine.name == "llama.cpp m-q4_0" and engine.facts["bytes"] == 5
    answer = engine.generate([[1] * 8] * 4, engines.Workload(4, 8, 12))
    assert answer == {"seconds": 3.0, "num_tokens": 48}
    with pytest.raises(SystemExit, match=r"(?s)ended with code 1: .*AssertionError"):
        engines.LlamaEngine(tool, file, 3).generate([[1] * 8] * 4, engines.Workload(4, 8, 12))


def test_a_worker_whose_engine_prints(load, tmp_path, monkeypatch):
    engines = load("offline_engines")
    (tmp_path / "vllm.py").write_text(VLLM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    options = {"dtype": "bfloat16", "threads": 2, "engine_args": {}}
    engine = engines.WorkerEngine("vllm", "vllm", sys.executable, tmp_path, options)
    try:
        assert engine.facts["version"] == "0.32.0"
        answer = engine.generate([[5, 6], [7, 8]], engines.Workload(2, 2, 9))
        assert answer["num_tokens"] == 18 and answer["seconds"] >= 0
        with pytest.raises(SystemExit, match="vllm ended with code"):
            engine.generate([[1, 2]], engines.Workload(1, 2, 9))
    finally:
        engine.close()


class Scripted:
    """An engine of a known speed."""

    def __init__(self, name: str, seconds: list[float], facts: dict[str, int]) -> None:
        self.name, self.facts, self._seconds = name, facts, iter(seconds)

    def generate(self, prompts, workload):
        assert len(prompts) == workload.batch and len(prompts[0]) == workload.num_prompt
        return {"seconds": next(self._seconds), "num_tokens": workload.batch * workload.num_output}


def test_ratios_and_the_limit(load, monkeypatch, capsys):
    """The first round warms up; the ratio is the median of the rounds' ratios."""
    script, engines = load("offline"), load("offline_engines")
    monkeypatch.setattr(script, "read_rate", lambda threads: 20e9)
    monkeypatch.setattr(sys, "argv", ["offline.py", "--rounds", "3", "--threads", "2"])
    args = script.parse_arguments()
    facts = {"weight_bytes": 90_000_000, "kv_bytes_per_token": 100_000}
    ours = Scripted("headrace", [9, 1, 2, 4], facts)
    theirs = Scripted("vllm", [9, 2, 2, 16], {})
    result = script.compare([ours, theirs], engines.Workload(1, 36, 128), args)
    assert result["tokens_per_s"] == {"headrace": [128, 64, 32], "vllm": [64, 64, 8]}
    assert result["ratios"] == {"vllm": [2, 1, 4]} and result["ratio"] == {"vllm": 2}
    limit = result["limit"]
    assert limit["bytes_per_token"] == 90e6 + 100e3 * 100 and limit["tokens_per_s"] == 200
    assert limit["shares"] == [0.64, 0.32, 0.16] and limit["share"] == 0.32
    script.print_table([result], ["headrace", "vllm"])
    printed = capsys.readouterr().out
    assert "64.0 (2.00x)" in printed and "headrace reaches 32 % of it" in printed
    for workload in (engines.Workload(2, 36, 128), engines.Workload(1, 1024, 1)):
        assert script.bytes_per_token(facts, workload) is None
    assert script.bytes_per_token({}, engines.Workload(1, 36, 128)) is None


def test_options_that_need_each_other(load, monkeypatch, capsys):
    script = load("offline")
    for argv in (["--gguf", "m.gguf"], ["--llama-batched-bench", "tool"], ["--rounds", "0"]):
        monkeypatch.setattr(sys, "argv", ["offline.py", *argv])
        with pytest.raises(SystemExit):
            script.parse_arguments()
    assert "need each other" in capsys.readouterr().err


def test_a_random_model(load, tmp_path):
    from headrace.configs.model_files.model_info import read_model_info
    from headrace.workers.weight_loader import iter_weights

    directory = tmp_path / "tiny"
    load("random_model").write_model(directory, "tiny")
    info = read_model_info(directory)
    config = json.loads((directory / "config.json").read_text())
    assert info.architecture == "LlamaForCausalLM" and info.hf_config["head_dim"] == 16
    weights = dict(iter_weights(str(directory), info.hf_config, torch.bfloat16))
    assert weights["model.embed_tokens.weight"].shape == (config["vocab_size"], 64)
    assert len(weights) == 2 + 2 * 9
    std = weights["model.layers.1.mlp.down_proj.weight"].float().std()
    assert std == pytest.approx(0.02, rel=0.05)
