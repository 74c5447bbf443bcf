"""`bench latency`, `throughput` and `startup` without an engine: options, results, parsing."""

import argparse
import statistics

import pytest

from headrace.configs.engine_args import AsyncEngineArgs, EngineArgs
from headrace.frontend.cli import serve as serve_command
from headrace.frontend.cli.bench import latency, throughput
from headrace.frontend.cli.bench.offline import changed_fields
from headrace.frontend.cli.bench.startup import drop_file_cache, read_table, server_flags
from headrace.frontend.cli.engine_options import engine_args_of
from headrace.frontend.startup_report import StartupReport


@pytest.mark.parametrize("kind", ["latency", "throughput", "startup", "serve", "kernels"])
def test_help(kind, headrace_command, capsys):
    assert headrace_command("bench", kind, "--help") == 0
    text = capsys.readouterr().out
    assert "examples:" in text and "--json FILE" in text
    if kind not in ("serve", "kernels"):
        assert "MODEL" in text and "--max-model-len" in text


def test_help_of_all_kinds(headrace_command, capsys):
    assert headrace_command("bench", "--help") == 0
    text = capsys.readouterr().out
    for kind in ("latency", "throughput", "startup", "serve", "kernels"):
        assert kind in text
    assert headrace_command("bench") == 2
    assert headrace_command("bench", "swep") == 2
    for argv in (("sweep", "serve", "--num-runs", "3"), ("mm-processor",)):
        assert headrace_command("bench", *argv) == 2
        assert "not implemented yet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("throughput", "--lora-path", "x"), "--lora-path"),
        (("throughput", "--prequeue-requests"), "--prequeue-requests"),
        (("throughput", "--backend", "hf"), "hf is not supported yet"),
        (("throughput", "--backend", "x"), "x does not exist"),
        (("throughput", "--dataset-name", "hf"), "hf is not supported yet"),
        (("latency", "--batch-size", "0"), "at least 1"),
        (("latency", "--num-iters-warmup", "-1"), "at least 0"),
        (("startup", "--num-iters-cold", "x"), "at least 0"),
    ],
)
def test_wrong_options(argv, message, headrace_command, capsys):
    assert headrace_command("bench", *argv) == 2
    assert message in capsys.readouterr().err


def test_result_of_latency():
    args = argparse.Namespace(input_len=32, output_len=10, batch_size=4, n=2)
    result = latency.make_result(args, [1.0, 3.0, 2.0], 0.3)
    assert result["avg_latency"] == 2 and result["latencies"] == [1.0, 3.0, 2.0]
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert result["percentiles"]["50"] == statistics.median([1, 2, 3])
    assert result["output_tokens_per_second"] == 4 * 2 * 10 / 2
    assert result["avg_step_time"] == 0.2
    assert result["avg_step_cpu_time_front_end"] == pytest.approx(0.01)


def test_result_of_throughput():
    result = throughput.make_result(throughput.Counts(2.0, 10, 300, 100))
    assert result == {
        "elapsed_time": 2.0, "num_requests": 10, "total_num_tokens": 400,
        "requests_per_second": 5.0, "tokens_per_second": 200.0, "total_input_tokens": 300,
        "total_output_tokens": 100, "output_tokens_per_second": 50.0,
    }  # fmt: skip


def test_phases_are_read_as_the_server_logs_them():
    report = StartupReport(0.0)
    report.critical = {"start front end": 0.125, "load weights, first": 1.5, "warm up": 0.75}
    report.overlapped = {"tokenizer": 0.25}
    report.total = 2.5
    text = f"12:00:00 INFO memory, in MiB:\n  weights  12.0\n12:00:01 INFO {report.table()}\n"
    table = read_table([*text.splitlines(), "12:00:02 INFO ready: m", "  not a phase  3.00"])
    assert table.phases == {"start front end": 0.12, "load weights, first": 1.5, "warm up": 0.75}
    assert table.overlapped == {"tokenizer": 0.25}


def test_server_flags_give_the_same_arguments_back():
    args = EngineArgs(
        model="m", max_model_len=512, enable_prefix_caching=False, dtype="float32",
        served_model_name=["a", "b"], hf_overrides={"x": 1}, hf_token="secret",
        disable_log_stats=True,
    )  # fmt: skip
    flags = server_flags(args)
    assert "secret" not in flags and flags[0] == "m"
    parser = argparse.ArgumentParser()
    serve_command.add_parser(parser.add_subparsers())
    parsed = engine_args_of(parser.parse_args(["serve", *flags]), AsyncEngineArgs)
    expected = {name: value for name, value in changed_fields(args).items() if name != "hf_token"}
    assert changed_fields(parsed) == expected


def test_dropping_files_from_the_cache(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "weights").write_bytes(bytes(5000))
    (tmp_path / "config").write_bytes(bytes(10))
    assert drop_file_cache(tmp_path) == 5010
    assert drop_file_cache(tmp_path / "config") == 10
