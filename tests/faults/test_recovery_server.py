"""A server whose engine core or API server dies: streams go on, or end with a typed error."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.server_process import ServerProcess, run_directories, wait_until
from tests.e2e.tiny_model import save_tiny_model
from tests.faults.faulty_workers import (
    MARKER,
    POISON,
    PoisonedWorker,
    SlowWorker,
    StartsOnce,
    name_of,
)
from tests.kernels.native_ops import available_isas

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SMALL = ("--dtype", "float32", "--num-gpu-blocks-override", "64", "--max-num-batched-tokens", "128",
         "--max-num-seqs", "8")  # fmt: skip
# As in the fault table: only the native kernels give the same bits in every batch.
REAL = ("--dtype", "bfloat16", "--quantization", "none", "--max-model-len", "256",
        "--num-gpu-blocks-override", "128", "--max-num-batched-tokens", "128",
        "--max-num-seqs", "16")  # fmt: skip
needs_native = pytest.mark.skipif(not available_isas(), reason="no native kernels on this machine")
StartServer = Callable[..., ServerProcess]
API_SERVER = "headrace.frontend.http.api_server"
# What differs between two answers to the same request.
PER_ANSWER = ("id", "created", "request_id")


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def start_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartServer]:
    """Starts servers that can import the faulty workers; kills what a failed test leaves."""
    servers: list[ServerProcess] = []
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))

    def start(model: Path, *options: str) -> ServerProcess:
        servers.append(ServerProcess(model, tmp_path, *options))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def bodies(max_tokens: int) -> list[dict[str, Any]]:
    """Requests of all kinds, as streams and whole."""
    common = {"max_tokens": max_tokens, "ignore_eos": True, "seed": 7, "return_token_ids": True}
    return [
        {**common, "prompt": "Once upon a time", "stream": True},
        {**common, "prompt": "The sea", "temperature": 1.0, "stream": True, "logprobs": 2},
        {**common, "prompt": "A list:", "temperature": 1.0, "n": 2, "stream": True,
         "stream_options": {"include_usage": True}},
        {**common, "prompt": "Water", "temperature": 1.0, "stop": [" the", "zq"], "logprobs": 1},
        {**common, "prompt": "It was a dark and stormy night", "prompt_logprobs": 1},
    ]  # fmt: skip


def content(answer: httpx.Response) -> Any:
    """What an answer says: of a stream, what its choices say in all."""
    assert answer.status_code == 200, answer.text
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return {k: v for k, v in answer.json().items() if k not in PER_ANSWER}
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    choices: dict[int, list[Any]] = {}
    usage = None
    for event in map(json.loads, lines):
        assert "error" not in event, event
        usage = event.get("usage") or usage
        for part in event["choices"]:
            choice = choices.setdefault(part["index"], ["", None, [], [], []])
            choice[0] += part["text"]
            choice[1] = part["finish_reason"] or choice[1]
            if part.get("logprobs"):
                choice[2] += part["logprobs"]["tokens"]
                choice[3] += part["logprobs"]["token_logprobs"]
            choice[4] += part.get("token_ids") or []
    return choices, usage


def contents(
    server: ServerProcess, pool: ThreadPoolExecutor, requests: list[dict[str, Any]]
) -> list[Any]:
    return list(pool.map(lambda body: content(server.complete(**body)), requests))


def begin(
    server: ServerProcess, pool: ThreadPoolExecutor, requests: list[dict[str, Any]], steps: int
) -> list[Future[httpx.Response]]:
    """The answers to come, some steps after the engine core has begun with the requests."""
    before = server.steps()
    answers = [pool.submit(server.complete, **body) for body in requests]
    wait_until(lambda: server.steps() >= before + steps, 30, f"{steps} steps")
    return answers


def status_of(server: ServerProcess) -> str:
    return str(server.get("/health/progress").json()["status"])


def child(server: ServerProcess, module: str) -> psutil.Process:
    """The only one that runs that module now."""
    (found,) = (
        process
        for process in psutil.Process(server.process.pid).children()
        if module in process.cmdline()
    )
    return found


def new_core(server: ServerProcess) -> psutil.Process:
    """The engine core of now."""
    return child(server, "headrace.engine_core")


def api_server(server: ServerProcess) -> psutil.Process:
    return child(server, API_SERVER)


def connections(server: ServerProcess) -> dict[psutil.Process, int]:
    """How many each API server has from clients."""
    return {
        process: sum(
            connection.laddr[1] == server.port and connection.status == psutil.CONN_ESTABLISHED
            for connection in process.net_connections("tcp4")
        )
        for process in psutil.Process(server.process.pid).children()
        if API_SERVER in process.cmdline()
    }


def assert_nothing_is_left(server: ServerProcess, temp: Path) -> None:
    server.process.send_signal(signal.SIGTERM)
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert server.process.wait(10) == 0
    assert not psutil.wait_procs(children, timeout=5)[1]
    assert run_directories(temp) == []


@needs_native
def test_answers_go_on_as_if_nothing_had_happened(
    start_server: StartServer, pool: ThreadPoolExecutor, smollm2_gguf: Path, tmp_path: Path
) -> None:
    """The front end lives through both kills, of which the second meets the replay."""
    server = start_server(smollm2_gguf, *REAL, "--max-restarts", "1000")
    front_end = api_server(server)
    undisturbed = contents(server, pool, bodies(80))
    answers = begin(server, pool, bodies(80), 25)
    first = new_core(server)
    first.kill()
    wait_until(lambda: server.get("/health/ready").status_code == 503, 10, "not ready")
    assert server.get("/health/live").status_code == 200 and status_of(server) == "restarting"
    late = pool.submit(server.complete, **bodies(80)[0])  # it is taken, and waits
    wait_until(server.is_ready, 30, "the next engine core is there")
    new_core(server).kill()
    assert [content(answer.result(60)) for answer in answers] == undisturbed
    assert content(late.result(60)) == undisturbed[0]
    metrics = server.metrics()
    assert metrics["engine_restarts_total"] == 2 and metrics["recovery_seconds_total"] > 0
    assert metrics["replayed_requests_total"] >= 5
    assert metrics["num_free_blocks"] == metrics["num_blocks"]
    log = server.log.read_text()
    assert "CPU kernels: native" in log
    assert log.count("killed by SIGKILL") == 2 and log.count("engine core recovered") == 2
    assert new_core(server).pid != first.pid
    assert api_server(server) == front_end and front_end.is_running()
    assert_nothing_is_left(server, tmp_path)


def test_a_killed_api_server_loses_its_own_connections_only(
    start_server: StartServer, pool: ThreadPoolExecutor, smollm2_gguf: Path, tmp_path: Path
) -> None:
    server = start_server(smollm2_gguf, *REAL)
    core = new_core(server)
    answers = begin(server, pool, bodies(200), 3)
    api_server(server).kill()
    for answer in answers:
        with pytest.raises(httpx.TransportError):
            answer.result(10)
    wait_until(server.is_ready, 30, "the next API server is there")
    assert server.complete(prompt=[1, 2], max_tokens=2).status_code == 200
    gauges = server.gauges()  # as the engine core told with the last step
    assert gauges["num_engine_requests"] == gauges["num_requests_running"] == 0
    assert gauges["num_free_blocks"] == server.metrics()["num_blocks"]
    assert new_core(server).pid == core.pid
    assert_nothing_is_left(server, tmp_path)


def test_several_api_servers(
    start_server: StartServer, pool: ThreadPoolExecutor, tiny_model: Path, tmp_path: Path
) -> None:
    """A killed engine core costs no answer; a killed API server those of its own connections."""
    worker = ("--worker-cls", name_of(SlowWorker))
    server = start_server(tiny_model, *SMALL, *worker, "--api-server-count", "2")
    requests = [{"prompt": [1, 2, 3 + i], "max_tokens": 110, "ignore_eos": True} for i in range(8)]
    undisturbed = contents(server, pool, requests)
    answers = [pool.submit(server.complete, **body) for body in requests]
    new_core(server).kill()
    assert [content(answer.result(30)) for answer in answers] == undisturbed
    answers = [pool.submit(server.complete, **body) for body in requests]
    wait_until(lambda: sum(connections(server).values()) == len(requests), 10, "all have begun")
    victim, num_lost = max(connections(server).items(), key=lambda item: item[1])
    victim.kill()
    for answer, whole in zip(answers, undisturbed, strict=True):
        try:
            assert content(answer.result(30)) == whole
        except httpx.TransportError:
            num_lost -= 1
    assert num_lost == 0
    assert_nothing_is_left(server, tmp_path)


@needs_native
def test_a_request_that_kills_the_engine_core_fails_alone(
    start_server: StartServer, pool: ThreadPoolExecutor, smollm2_gguf: Path
) -> None:
    worker = ("--worker-cls", name_of(PoisonedWorker), "--max-restarts", "1")
    server = start_server(smollm2_gguf, *REAL, *worker)
    undisturbed = contents(server, pool, bodies(80))
    answers = begin(server, pool, bodies(80), 5)
    bad = {"prompt": [1, POISON], "max_tokens": 5}
    for body in (bad, {**bad, "stream": True}):
        answer = server.complete(**body)
        if answer.status_code == 200:
            events = [line for line in answer.text.splitlines() if line]
            assert events[-1] == "data: [DONE]"
            error = json.loads(events[-2].removeprefix("data: "))["error"]
        else:
            error = answer.json()["error"]
        assert error["code"] == 500 and "crashed whenever this request ran" in error["message"]
    assert [content(answer.result(30)) for answer in answers] == undisturbed


def test_restarts_that_fail_end_the_server(
    start_server: StartServer,
    pool: ThreadPoolExecutor,
    smollm2_gguf: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    marker = tmp_path / "marker"
    monkeypatch.setenv(MARKER, str(marker))
    worker = ("--worker-cls", name_of(StartsOnce), "--max-restarts", "1")
    server = start_server(smollm2_gguf, *REAL, *worker)
    answers = begin(server, pool, bodies(200), 5)
    marker.touch()
    new_core(server).kill()
    num_streams = 0
    for answer in (future.result(30) for future in answers):
        if answer.status_code == 200:
            num_streams += 1
            events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
            assert events[-1] == "[DONE]" and json.loads(events[-2])["error"]["code"] == 503
        else:
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
    assert 0 < num_streams < len(answers)
    assert server.process.wait(10) == 1
    last_line = server.log.read_text().strip().splitlines()[-1]
    assert last_line.startswith("headrace: error:") and "SIGKILL" in last_line
    assert not psutil.wait_procs(server.children, timeout=5)[1]
    assert run_directories(tmp_path) == []


def test_the_end_of_the_first_process_is_the_end_of_all(
    start_server: StartServer, tiny_model: Path, tmp_path: Path
) -> None:
    server = start_server(tiny_model, *SMALL, "--api-server-count", "2")
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait(5)
    assert len(server.children) == 3
    assert not psutil.wait_procs(server.children, timeout=5)[1]
    wait_until(lambda: not run_directories(tmp_path), 5, "the run directory is gone")
