"""`headrace bench serve` as a command: options, exit codes, files, what it prints."""

import json
import re

import pytest

from headrace.frontend.cli.bench.server_clock import between, sums_of

BUILT = """
    --backend --base-url --host --port --endpoint --model --served-model-name --tokenizer
    --tokenizer-mode --skip-tokenizer-init --dataset-name --dataset-path --num-prompts
    --num-warmups --no-oversample --disable-shuffle --request-rate --burstiness --max-concurrency
    --ramp-up-strategy --ramp-up-start-rps --ramp-up-end-rps --input-len --output-len
    --random-input-len --random-output-len --random-range-ratio --random-prefix-len --temperature
    --top-p --top-k --min-p --frequency-penalty --presence-penalty --repetition-penalty
    --ignore-eos --logprobs --extra-body --header --percentile-metrics --metric-percentiles
    --goodput --save-result --save-detailed --append-result --result-dir --result-filename
    --metadata --label --ready-check-timeout-sec --request-id-prefix --seed --insecure
    --disable-tqdm --json --output-json
"""
REFUSED = "--profile --lora-modules --lora-assignment --plot-timeline --probe-request-rate"
FIELDS = """
    date backend endpoint_type label model_id tokenizer_id num_prompts request_rate burstiness
    max_concurrency duration completed failed total_input_tokens total_output_tokens
    request_throughput request_goodput output_throughput total_token_throughput
    max_output_tokens_per_s max_concurrent_requests input_lens output_lens ttfts itls latencies
    start_times generated_texts errors
"""


def serve(run, mock, *argv, **script):
    return run(
        "bench", "serve", "--base-url", mock.url, "--disable-tqdm", "--num-prompts", 6,
        "--input-len", 9, "--output-len", 4, "--extra-body", json.dumps({"mock": script}), *argv,
    )  # fmt: skip


@pytest.mark.parametrize("option", BUILT.split())
def test_options_that_are_there(option, headrace_command, capsys):
    assert headrace_command("bench", "serve", f"--help={option}") == 0
    assert option in capsys.readouterr().out


@pytest.mark.parametrize("option", REFUSED.split())
def test_options_that_are_refused_by_name(option, headrace_command, capsys):
    assert headrace_command("bench", "serve", option, "x") == 2
    assert option in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--backend", "openai-audio"), "openai-audio is not supported yet"),
        (("--backend", "nope"), "nope does not exist"),
        (("--goodput", "itl:3"), "itl does not exist"),
        (("--goodput", "ttft"), "METRIC:MS"),
        (("--percentile-metrics", "ttft,foo"), "foo does not exist"),
        (("--ramp-up-start-rps", "3"), "need --ramp-up-strategy"),
        (("--ramp-up-strategy", "linear"), "needs --ramp-up-start-rps"),
        (("--save-detailed",), "needs --save-result"),
        (("--request-rate", "0"), "not a number above 0"),
        (("--metric-percentiles", "0"), "list of percentages"),
        (("--endpoint", "v1"), "must start with /"),
        (("--tokenizer-mode", "mistral"), "mistral is not supported yet"),
        (("--json", "/nowhere/at/all"), "must exist"),
    ],
)
def test_wrong_options(argv, message, headrace_command, capsys):
    assert headrace_command("bench", "serve", *argv) == 2
    assert message in capsys.readouterr().err


def test_a_run_prints_and_writes_its_result(mock, headrace_command, capsys, tmp_path):
    file = tmp_path / "result.json"
    code = serve(
        headrace_command, mock, "--json", file, "--save-result", "--save-detailed", "--result-dir",
        tmp_path, "--label", "trial", "--metadata", "note=quiet", "--percentile-metrics",
        "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99.9", "--goodput", "e2el:10000",
        "--max-concurrency", 3, "--num-warmups", 2, ttft_ms=20.0, itl_ms=5.0,
    )  # fmt: skip
    assert code == 0
    result = json.loads(file.read_text())
    for field in FIELDS.split():
        assert field in result
    for metric in ("ttft", "tpot", "itl", "e2el"):
        for name in ("mean", "median", "std", "p50", "p99.9"):
            assert result[f"{name}_{metric}_ms"] >= 0
    assert result["mean_ttft_ms"] >= 20 and result["mean_e2el_ms"] >= 35
    assert (result["completed"], result["total_output_tokens"]) == (6, 24)
    assert result["model_id"] == "mock" and result["note"] == "quiet"
    assert result["output_lens"] == [4] * 6 and result["generated_texts"] == [" a a a a"] * 6
    assert result["request_goodput"] == result["request_throughput"]
    assert result["server_mean_ms"]["ttft"] == pytest.approx(20.0)
    [saved] = tmp_path.glob("trial-infqps-concurrency3-mock-*.json")
    assert re.fullmatch(r".*-\d{8}-\d{6}", saved.stem)
    assert json.loads(saved.read_text()) == result
    printed = capsys.readouterr().out
    for words in ("successful requests:", "output tokens/s", "time to first token", "p99.9",
                  "client", "server"):  # fmt: skip
        assert words in printed


def test_prompts_have_the_length_and_are_repeated_by_the_seed(mock, headrace_command, tmp_path):
    found = []
    for seed in (1, 1, 2):
        file = tmp_path / "r.json"
        argv = ("--json", file, "--save-detailed", "--seed", seed, "--random-range-ratio", "0.9")
        assert serve(headrace_command, mock, *argv) == 0
        found.append(json.loads(file.read_text())["input_lens"])
    assert found[0] == found[1] != found[2]


def test_appended_results_are_lines(mock, headrace_command, tmp_path):
    for _ in range(2):
        argv = ("--append-result", "--result-dir", tmp_path, "--result-filename", "all.jsonl")
        assert serve(headrace_command, mock, *argv) == 0
    lines = (tmp_path / "all.jsonl").read_text().splitlines()
    assert [json.loads(line)["completed"] for line in lines] == [6, 6]


def test_chat(mock, headrace_command, capsys):
    code = serve(headrace_command, mock, "--backend", "openai-chat", "--logprobs", 2, ttft_ms=30.0)
    assert code == 0 and "successful requests:" in capsys.readouterr().out


def test_failures_are_told_and_have_no_figures(mock, headrace_command, capsys, tmp_path):
    file = tmp_path / "r.json"
    assert serve(headrace_command, mock, "--json", file, fail="status") == 1
    printed = capsys.readouterr().out
    assert (
        "HTTP 429" in printed and "slow down" in printed and "nothing to take a mean of" in printed
    )
    assert "tokens/s" not in printed
    result = json.loads(file.read_text())
    assert result["errors_by_kind"] == {"HTTP 429": 6} and result["mean_ttft_ms"] is None
    assert serve(headrace_command, mock, "--allow-failures", fail="cut") == 0


def test_a_rate_reports_how_late_requests_were_sent(mock, headrace_command, capsys):
    assert serve(headrace_command, mock, "--request-rate", 100, "--burstiness", 2) == 0
    assert "mean delay of sending" in capsys.readouterr().out


def test_no_server(headrace_command, capsys):
    assert headrace_command("bench", "serve", "--port", 9) == 1
    assert "127.0.0.1:9" in capsys.readouterr().err


def test_self_check(headrace_command, capsys, tmp_path):
    file = tmp_path / "check.json"
    code = headrace_command("bench", "serve", "--self-check", "--json", file)
    report = json.loads(file.read_text())
    assert (code == 0) is report["is_good"] is (report["max_error"] < 0.02)
    assert "mean_ttft_ms" in capsys.readouterr().out


def test_server_clock_is_the_difference_of_two_scrapes():
    def text(count: int, total: float, hits: int) -> str:
        labels = '{model_name="m",engine="0"}'
        return (
            "# TYPE headrace:time_to_first_token_seconds histogram\n"
            f'headrace:time_to_first_token_seconds_bucket{{le="+Inf",engine="0"}} {count}\n'
            f"headrace:time_to_first_token_seconds_count{labels} {count}\n"
            f"headrace:time_to_first_token_seconds_sum{labels} {total}\n"
            "# TYPE headrace:prefix_cache_queries counter\n"
            f"headrace:prefix_cache_queries_total{labels} {10 * count}\n"
            "# TYPE headrace:prefix_cache_hits counter\n"
            f"headrace:prefix_cache_hits_total{labels} {hits}\n"
        )

    clock = between(sums_of(text(2, 1.0, 0)), sums_of(text(6, 2.0, 10)))
    assert clock is not None
    assert clock.means_ms == {"ttft": 250.0} and clock.cache_hit_share == 0.25
    nothing = between(sums_of(text(2, 1.0, 0)), sums_of(text(2, 1.0, 0)))
    assert nothing is not None and nothing.means_ms == {} and nothing.cache_hit_share is None
    assert between(None, {}) is None
