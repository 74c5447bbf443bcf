"""Options said once: values on the command line; and the environment registry."""

import argparse
from typing import Any

import pytest

from headrace.configs import environment
from headrace.configs.engine_args import EngineArgs
from headrace.configs.environment import VARIABLES, check_environ
from headrace.configs.errors import ConfigurationError
from headrace.configs.options import parse_json, parse_json_object, parse_size


def parse(*arguments: str) -> EngineArgs:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser(allow_abbrev=False))
    return EngineArgs.from_cli_args(parser.parse_args(arguments))


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (["--max-model-len", "4k"], "max_model_len", 4000),
        (["--max-model-len", "4K"], "max_model_len", 4096),
        (["--max-num-batched-tokens", "1m"], "max_num_batched_tokens", 1_000_000),
        (["--max-num-queued-tokens", "1.5k"], "max_num_queued_tokens", 1500),
        (["--kv-cache-memory", "2G"], "kv_cache_memory_bytes", 2 * 1024**3),
        (["--kv-cache-memory-bytes", "25.6k"], "kv_cache_memory_bytes", 25600),
        (["--device-memory-utilization", "0.5"], "gpu_memory_utilization", 0.5),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
        (["--enable-prefix-caching"], "enable_prefix_caching", True),
        (["--disable-log-stats"], "disable_log_stats", True),
        (["--served-model-name", "a", "b"], "served_model_name", ["a", "b"]),
        (["--served-model-name", "None"], "served_model_name", None),
        (["--seed", "3"], "seed", 3),
        (["--seed", "None"], "seed", None),
        (["--seed="], "seed", None),
        (["--tokenizer", ""], "tokenizer", None),
        (["--dtype", "float32"], "dtype", "float32"),
        (["--hf-token"], "hf_token", True),
        (["--hf-token", "t"], "hf_token", "t"),
        (["--hf-overrides", '{"a": {"b": 1}}'], "hf_overrides", {"a": {"b": 1}}),
        (["--speculative-config", '{"method": "ngram"}'], "speculative_config",
         {"method": "ngram"}),
        (["-sc", "None"], "speculative_config", None),
        (["-O3"], "compilation_config", 3),
        (["-O", "3"], "compilation_config", 3),
        (["-O=3"], "compilation_config", 3),
        (["--optimization-level", "0"], "compilation_config", 0),
        (["-cc", '{"mode": 3}'], "compilation_config", {"mode": 3}),
        (["-tp", "2", "-pp=3"], "pipeline_parallel_size", 3),
        (["-q", "AWQ"], "quantization", "awq"),
        (["--long-lora-scaling-factors", "1", "2.5"], "long_lora_scaling_factors", [1.0, 2.5]),
        (["--cuda-graph-sizes", "1", "8"], "cuda_graph_sizes", [1, 8]),
        (["--lora-dtype", "None"], "lora_dtype", None),
        (["--max-logprobs", "-1"], "max_logprobs", -1),
    ],
)  # fmt: skip
def test_flags(arguments: list[str], field: str, value: Any) -> None:
    assert getattr(parse(*arguments), field) == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seed", "x"], "invalid int value: 'x'"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--hf-overrides", "{"], "is not JSON"),
        (["--hf-overrides", "[1]"], "is not a JSON object"),
        (["--max-model-len", "1.5K"], "lower-case suffix"),
        (["--disable-log-stats=1"], "ignored explicit argument"),
    ],
)
def test_words_that_are_no_values(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse(*arguments)
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_sizes() -> None:
    sizes = {
        "0": 0, "12": 12, "1k": 10**3, "1m": 10**6, "1g": 10**9, "1t": 10**12, "1K": 2**10,
        "2M": 2**21, "1G": 2**30, "1T": 2**40, "25.6k": 25600, "0.5m": 500_000, " 4k ": 4000,
    }  # fmt: skip
    assert {text: parse_size(text) for text in sizes} == sizes


@pytest.mark.parametrize("text", ["", "x", "1.5K", "1.5", "-1", "1kk", "0x10", "1e3", "k"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_size(text)


def test_json() -> None:
    assert parse_json("[1, null]") == [1, None]
    for text in ("", "{'a': 1}", "[" * 100_000):
        with pytest.raises(argparse.ArgumentTypeError, match="is not JSON"):
            parse_json(text)
    with pytest.raises(argparse.ArgumentTypeError, match="object"):
        parse_json_object("3")


def test_environment_registry() -> None:
    defined = [v for v in vars(environment).values() if isinstance(v, environment.Variable)]
    assert set(defined) == set(VARIABLES)
    check_environ({variable.name: "" for variable in VARIABLES})
    check_environ(
        {
            "HEADRACE_SERVICE_HOST": "10.0.0.1",
            "HEADRACE_PORT": "tcp://10.0.0.1:8000",
            "HEADRACE_PORT_8000_TCP_ADDR": "10.0.0.1",
            "HEADRACE_CHAT_SERVICE_PORT_HTTP": "8000",
            "HOME": "/",
        }
    )
    with pytest.raises(ConfigurationError, match=r"HEADRACE_CASHE.*HEADRACE_CACHE"):
        check_environ({"HEADRACE_CASHE": "x"})


def test_no_variable_looks_like_one_that_kubernetes_sets() -> None:
    for variable in VARIABLES:
        name = variable.name
        assert not any(part in name for part in ("_SERVICE_", "_PORT_")) and name[-5:] != "_PORT"
        assert name in environment.table() and variable.help in environment.table()


def test_values_of_variables() -> None:
    assert environment.read_log_level({}) is None
    assert environment.read_log_level({"HEADRACE_LOGGING_LEVEL": "DEBUG"}) == "debug"
    with pytest.raises(ConfigurationError, match=r"HEADRACE_LOGGING_LEVEL.*debug.*'loud'"):
        environment.read_log_level({"HEADRACE_LOGGING_LEVEL": "loud"})
    assert environment.read_number(environment.LOG_STATS_INTERVAL, {}) == 10
    for text, expected in (("0", False), ("1", True), ("", True)):
        switch = {"HEADRACE_MULTIPROCESSING": text}
        assert environment.read_switch(environment.MULTIPROCESSING, switch) is expected
    with pytest.raises(ConfigurationError, match="must be 0 or 1, got 'maybe'"):
        environment.read_switch(environment.MULTIPROCESSING, {"HEADRACE_MULTIPROCESSING": "maybe"})
