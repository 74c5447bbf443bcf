"""Options said once: CLI, defaults, checks; and the environment registry."""

import argparse
import dataclasses

import pytest

from headrace.configs.engine_args import AsyncEngineArgs, EngineArgs
from headrace.configs.environment import VARIABLES, check_environ
from headrace.configs.errors import ConfigurationError
from headrace.configs.options import parse_size


def parse(*arguments: str) -> EngineArgs:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    return EngineArgs.from_cli_args(parser.parse_args(arguments))


def test_defaults_of_cli_and_python_are_the_same() -> None:
    assert parse() == EngineArgs()


def test_every_field_has_a_flag_and_help() -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    flags = {action.dest: action for action in parser._actions}
    for field in dataclasses.fields(EngineArgs):
        if field.name != "model":
            assert flags[field.name].help


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (["--max-model-len", "4k"], "max_model_len", 4000),
        (["--max-model-len", "4K"], "max_model_len", 4096),
        (["--kv-cache-memory", "2G"], "kv_cache_memory_bytes", 2 * 1024**3),
        (["--kv-cache-memory-bytes", "25.6k"], "kv_cache_memory_bytes", 25600),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
        (["--served-model-name", "a", "b"], "served_model_name", ["a", "b"]),
        (["--seed", "3"], "seed", 3),
        (["--dtype", "float32"], "dtype", "float32"),
    ],
)
def test_flags(arguments: list[str], field: str, value: object) -> None:
    assert getattr(parse(*arguments), field) == value


@pytest.mark.parametrize("text", ["", "x", "1.5K", "-1", "1kk", "0x10"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_size(text)


def test_unknown_arguments_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="tensor_parallel_sise"):
        EngineArgs(tensor_parallel_sise=2)  # type: ignore[call-arg]
    assert issubclass(AsyncEngineArgs, EngineArgs)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"block_size": 0}, "block_size"),
        ({"max_num_seqs": -1}, "max_num_seqs"),
        ({"dtype": "float8"}, "dtype"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy"),
        ({"generation_config": "folder"}, "generation_config must be one of auto"),
        ({"max_logprobs": -1}, "max_logprobs"),
    ],
)
def test_values_that_cannot_work(arguments: dict[str, object], name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        EngineArgs(model="no-such-model", **arguments).create_engine_config()  # type: ignore[arg-type]


def test_environment_registry() -> None:
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
