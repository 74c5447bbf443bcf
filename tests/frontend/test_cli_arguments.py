"""The command line before argparse: help by topic, dotted keys, `--config`, known flags."""

import argparse
import contextlib
import importlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.configs.engine_args import AsyncEngineArgs, EngineArgs
from headrace.configs.errors import ConfigurationError
from headrace.frontend.cli import main as cli
from headrace.frontend.cli.arguments import merge_dotted_keys, with_dashes
from headrace.frontend.cli.config_file import add_config_option, apply_config_file
from headrace.frontend.cli.known_flags import KNOWN_COMMANDS, KNOWN_FLAGS
from headrace.frontend.cli.parser import Parser


def engine_parser() -> Parser:
    parser = Parser(prog="headrace test", allow_abbrev=False)
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--model", default="default-model", help=argparse.SUPPRESS)
    parser.add_argument("--names", type=lambda text: text.split(","), help="a list in one word")
    parser.add_argument("--more", action="append", help="repeatable")
    AsyncEngineArgs.add_cli_args(parser)
    add_config_option(parser)
    return parser


def parse(*words: str) -> argparse.Namespace:
    parser = engine_parser()
    arguments = [with_dashes(word) for word in words]
    apply_config_file(parser, arguments)
    return parser.parse_args(merge_dotted_keys(parser, arguments))


def run(*words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command line."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(words)
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue(), err.getvalue()


@pytest.mark.parametrize(
    ("word", "dashed"),
    [
        ("--max_model_len", "--max-model-len"),
        ("--max_model_len=a_b", "--max-model-len=a_b"),
        ("--hf_overrides.rope_theta", "--hf-overrides.rope_theta"),
        ("--hf_overrides.a_b.c_d=e_f", "--hf-overrides.a_b.c_d=e_f"),
        ("a_b", "a_b"),
        ("-q_", "-q_"),
    ],
)
def test_underscores(word: str, dashed: str) -> None:
    assert with_dashes(word) == dashed


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--hf-overrides.rope_theta", "5"], {"rope_theta": 5}),
        (["--hf_overrides.rope_theta=5e5"], {"rope_theta": 5e5}),
        (["--hf-overrides.n", "4k"], {"n": 4000}),
        (["--hf-overrides.n=4K"], {"n": 4096}),
        (["--hf-overrides.text", "a b"], {"text": "a b"}),
        (["--hf-overrides.text="], {"text": ""}),
        (["--hf-overrides.flag=true", "--hf-overrides.none", "null"], {"flag": True, "none": None}),
        (["--hf-overrides.a.b.c", "1", "--hf-overrides.a.d", "2"], {"a": {"b": {"c": 1}, "d": 2}}),
        (["--hf-overrides.l+", "x", "--hf-overrides.l+=1,b"], {"l": ["x", 1, "b"]}),
        (["--hf-overrides.a.l+", "x,y"], {"a": {"l": ["x,y"]}}),
        (["--hf-overrides", '{"a": 1, "b": 2}', "--hf-overrides.a", "3"], {"a": 3, "b": 2}),
        (["--hf-overrides.a", "3", "--hf-overrides", '{"a": 1, "b": 2}'], {"a": 3, "b": 2}),
        (["--hf-overrides.l+", "2", '--hf-overrides={"l": [1]}'], {"l": [1, 2]}),
        (["--hf-overrides.a=[1, {}]"], {"a": [1, {}]}),
        (["--hf-overrides.a=x=y"], {"a": "x=y"}),
        (["--hf-overrides.a", "-1"], {"a": -1}),
    ],
)
def test_dotted_keys(words: list[str], value: dict[str, Any]) -> None:
    args = parse("some-model", *words, "--seed", "3")
    assert args.hf_overrides == value
    assert args.model_tag == "some-model" and args.seed == 3


def test_dotted_keys_of_short_flags() -> None:
    args = parse("-sc.method", "ngram", "-sc.num_speculative_tokens", "5", "-cc.mode", "3")
    assert args.speculative_config == {"method": "ngram", "num_speculative_tokens": 5}
    assert args.compilation_config == {"mode": 3}


def test_duplicate_dotted_keys_warn(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("--hf-overrides.a", "1", "--hf-overrides.a", "2").hf_overrides == {"a": 2}
    warning = capsys.readouterr().err
    assert "--hf-overrides.a is given twice" in warning and warning.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hf-overrides.a"], "a value is missing"),
        (["--hf-overrides.a..b", "1"], "between the dots is empty"),
        (["--hf-overrides.a", "1", "--hf-overrides.a.b", "2"], "a is 1, which has no keys"),
        (["--hf-overrides.a", "1", "--hf-overrides.a+", "2"], "appends to a list"),
        (["--hf-overrides", "{", "--hf-overrides.a", "1"], "is not JSON"),
        (["-O", "3", "--compilation-config.mode", "1"], "cannot have keys"),
    ],
)
def test_dotted_keys_that_cannot_be(words: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse(*words)


def write(tmp_path: Path, text: str, name: str = "options.yaml") -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


EVERY_FORM = """
model: file-model
max-model-len: 4k
max_num_seqs: 7
gpu-memory-utilization: 0.5
served-model-name: [a, b]
enable-prefix-caching: false
disable-log-stats: true
hf-overrides: {rope_theta: 5.0, deep: {x: [1]}}
seed: null
tokenizer: 'None'
names: one,two
more: [x, y]
dtype: float32
max-logprobs: -1
"""


@pytest.mark.parametrize("form", ["two words", "one word"])
@pytest.mark.parametrize("name", ["options.yaml", "options.yml"])
def test_config_file(form: str, name: str, tmp_path: Path) -> None:
    path = write(tmp_path, EVERY_FORM, name)
    args = parse(*(["--config", path] if form == "two words" else [f"--config={path}"]))
    engine = EngineArgs.from_cli_args(args)
    assert engine == EngineArgs(
        model="file-model", max_model_len=4000, max_num_seqs=7, gpu_memory_utilization=0.5,
        served_model_name=["a", "b"], enable_prefix_caching=False, disable_log_stats=True,
        hf_overrides={"rope_theta": 5.0, "deep": {"x": [1]}}, dtype="float32", max_logprobs=-1,
    )  # fmt: skip
    assert args.names == ["one", "two"] and args.more == ["x", "y"]


def test_command_line_beats_file_beats_default(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "served-model-name: [a, b]\nmax-num-seqs: 7\nenable-prefix-caching: false\n"
        "disable-log-stats: false\nhf-overrides: {a: 1}\nmore: [x]\nkv-cache-memory: 1k\n",
    )
    words = ["--served-model-name", "c", "--enable-prefix-caching", "--hf-overrides.b", "2"]
    args = parse("tag", *words, "--config", path, "--more", "y", "--kv-cache-memory-bytes", "5")
    assert args.model_tag == "tag" and args.served_model_name == ["c"]
    assert args.max_num_seqs == 7 and args.enable_prefix_caching is True
    assert args.hf_overrides == {"b": 2} and args.more == ["y"]
    assert args.kv_cache_memory_bytes == 5
    assert args.disable_log_stats is False and args.block_size is None


def test_empty_config_file(tmp_path: Path) -> None:
    assert parse("--config", write(tmp_path, "# nothing\n")) == argparse.Namespace(
        **vars(parse()) | {"config": str(tmp_path / "options.yaml")}
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-modl-len: 3", r"options\.yaml: max-modl-len: .*did you mean --max-model-len\?"),
        ("numa-bind: 3", r"options\.yaml: numa-bind: .*known but not implemented"),
        ("seed: x", r"options\.yaml: seed: invalid int value: 'x'"),
        ("max-model-len: 1.5", r"max-model-len: .*lower-case suffix"),
        ("dtype: int8", r"dtype: must be one of auto, .*'int8'"),
        ("enable-prefix-caching: maybe", r"enable-prefix-caching: must be true or false"),
        ("no-enable-prefix-caching: true", r"write enable-prefix-caching: false"),
        ("disable-log-stats: 1", r"disable-log-stats: must be true or false, got 1"),
        ("hf-overrides: 3", r"hf-overrides: .*not a JSON object"),
        ("config: other.yaml", r"options\.yaml: config"),
        ("1: 2", r"options\.yaml: 1: unrecognized"),
        ("- a\n- b", "must hold lines like"),
        ("a: [", "not valid YAML"),
        ("a: !!python/object/apply:os.getpid []", "not valid YAML"),
    ],
)
def test_config_files_that_cannot_be(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message) as error:
        parse("--config", write(tmp_path, text))
    assert "\n" not in str(error.value)


def test_config_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"missing\.yaml: No such file"):
        parse(f"--config={tmp_path}/missing.yaml")
    with pytest.raises(ConfigurationError, match=r"must end in \.yaml or \.yml"):
        parse("--config", write(tmp_path, "", "options.json"))
    path = write(tmp_path, "seed: 1")
    with pytest.raises(ConfigurationError, match="given 2 times"):
        parse("--config", path, f"--config={path}")


def test_config_file_of_a_command(tmp_path: Path) -> None:
    path = write(tmp_path, "tensor-parallel-size: 2\n")
    code, _, err = run("serve", "--config", path)
    assert code == 2 and err.count("\n") == 1 and "tensor_parallel_size 2 does not" in err
    code, _, err = run("serve", f"--config={write(tmp_path, 'prot: 2')}")
    assert code == 2 and "options.yaml: prot" in err and "--port" in err


def test_short_help_teaches_and_names_the_rest() -> None:
    code, text, _ = run("serve", "--help")
    assert code == 0 and len(text.splitlines()) < 120
    for word in (
        "usage: headrace serve [MODEL] [options]", "--max-model-len", "--port", "ModelConfig (",
        "SchedulerConfig (", "--help=all", "--config FILE", "examples:",
    ):  # fmt: skip
        assert word in text, word
    assert "--eplb-window-size" not in text


def test_help_by_topic() -> None:
    code, everything, _ = run("serve", "--help=all")
    assert (
        code == 0 and "--eplb-window-size" in everything and "[not implemented yet]" in everything
    )
    _, group, _ = run("serve", "--help=cacheconfig")
    assert "--block-size" in group and "--dtype" not in group
    assert run("serve", "--help=Cache")[1] == group
    for flag in ("max-model-len", "--max-model-len", "max_model_len"):
        _, text, _ = run("serve", f"--help={flag}")
        assert "--max-model-len LEN" in text and text.count("--") == 1
    assert run("serve", "--help=-tp")[1].count("--") == 1
    _, found, _ = run("serve", "--help=Prefixes")
    assert "--enable-prefix-caching" in found and "--dtype" not in found
    assert run("--help=block_size")[1] == run("serve", "--help=block-size")[1]
    code, out, err = run("serve", "--help=no such thing")
    assert code == 2 and not out and "no such thing" in err


def test_help_on_the_environment() -> None:
    for words in (["--help=env"], ["serve", "--help=env"]):
        code, text, _ = run(*words)
        assert code == 0 and "HEADRACE_CACHE" in text and "HEADRACE_MULTIPROCESSING" in text


def parsers(parser: Parser) -> Iterator[Parser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                if isinstance(inner, Parser):
                    yield from parsers(inner)


def command_parser(name: str) -> Parser:
    return cli._make_parser([name])[0].chosen([name])


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_flags_that_exist_are_not_called_missing(name: str) -> None:
    for parser in parsers(command_parser(name)):
        for flag in KNOWN_FLAGS:
            action = parser.option(flag)
            assert action is None or action.help is argparse.SUPPRESS, flag


def test_known_flags_are_refused_by_name() -> None:
    parser = command_parser("serve")
    for flag in KNOWN_FLAGS:
        assert f"{flag} is known but not implemented yet" in parser.unknown_flag(flag), flag
    code, _, err = run("serve", "some-model", "--ssl-ciphers", "x")
    assert code == 2 and "--ssl-ciphers is known but not implemented yet (TLS)" in err
    assert "nearest" not in parser.unknown_flag("--grpc")  # nothing stands in for it
    code, _, err = run("serve", "--quantization-config.a=1")
    assert code == 2 and "--quantization-config is known" in err
    for command in KNOWN_COMMANDS:
        code, _, err = run(command, "-i", "x")
        assert code == 2 and f"{command} is known but not implemented yet" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["-tp", "2"],
            "tensor_parallel_size 2 does not divide the model's 9 query heads; use 1 or 3",
        ),
        (["-pp", "31"], "pipeline_parallel_size 31 is above the model's 30 layers"),
        (["--enable-lora"], "--enable-lora is not implemented yet"),
        (["--max-model-len", "auto"], "--max-model-len auto is not implemented yet"),
        (["--no-enable-chunked-prefill"], "enable_chunked_prefill=False is refused"),
        (["--block-size", "-1"], "block_size must be at least 1, got -1"),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(words: list[str], message: str) -> None:
    code, out, err = run("serve", *words)
    assert code == 2 and not out
    assert err.startswith("headrace: error: ") and err.count("\n") == 1 and message in err


def test_every_command_is_there_and_has_help() -> None:
    for name, command in cli.COMMANDS.items():
        module = importlib.import_module(command.module)
        assert callable(module.add_parser) and callable(module.run)
        code, text, _ = run(name, "--help")
        assert code == 0 and f"usage: headrace {name}" in text
