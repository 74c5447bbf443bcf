"""The same texts, whoever starts the workers: actors of Ray, processes of torchrun."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e import tiny_model
from tests.e2e.server_process import ServerProcess
from tests.e2e.tiny_engine import save_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

# Shared prefixes, prompts in several chunks, and a cache that does not hold all of them.
SCRIPT = """
import json, os, sys
from headrace import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(
        sys.argv[1], skip_tokenizer_init=True, dtype="float32", seed=1, max_num_seqs=4,
        max_num_batched_tokens=16, block_size=4, num_gpu_blocks_override=24, max_model_len=64,
        **json.loads(sys.argv[2]),
    )
    shared = [3, 9, 27, 17, 19, 25, 11, 2, 6, 18, 22, 4]
    prompts = [{"prompt_token_ids": shared[: 4 + i] + [i + 5] * (1 + 3 * i)} for i in range(6)]
    params = [
        SamplingParams(
            temperature=0.0 if i % 2 == 0 else 1.0, max_tokens=20, logprobs=1, ignore_eos=True
        )
        for i in range(6)
    ]
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    ranks = llm.collective_rpc(lambda worker: worker.setup.rank)
    result = {"texts": [list(output.token_ids) for output in outputs], "ranks": ranks}
    result["listening"] = sorted(  # addresses, in this network namespace
        line.split()[1].partition(":")[0]
        for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}") if " 0A " in line
    )
    with open(os.path.join(sys.argv[3], os.environ.get("RANK", "0")), "w") as file:
        json.dump(result, file)
    llm.close()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    (result,) = run(model, tmp_path_factory.mktemp("alone"))
    texts: list[list[int]] = result["texts"]
    assert len({tuple(text) for text in texts}) > 3
    return texts


def run(
    model: Path,
    directory: Path,
    launcher: tuple[str, ...] = ("-P",),
    before: tuple[str, ...] = (),
    **options: Any,
) -> list[dict[str, Any]]:
    """What each process of the script has written, by rank. `before`: of the command line."""
    script = directory / "script.py"
    script.write_text(SCRIPT)
    out = directory / "out"
    out.mkdir()
    environ = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    subprocess.run(
        [*before, sys.executable, *launcher, str(script), str(model), json.dumps(options),
         str(out)],
        env=environ, check=True, timeout=200,
    )  # fmt: skip
    files = sorted(out.iterdir(), key=lambda path: int(path.name))
    return [json.loads(path.read_text()) for path in files]


def processes_named(word: str) -> set[int]:
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        if any(word in argument for argument in process.info["cmdline"] or []):
            found.add(process.pid)
    return found


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_ray(model: Path, alone: list[list[int]], tmp_path: Path, tp: int, pp: int) -> None:
    """In a cluster that the engine core starts, since there is none; nothing of it is left."""
    pytest.importorskip("ray", reason="Ray is not installed (the extra `ray`)")
    before = processes_named("ray")
    (result,) = run(
        model, tmp_path, distributed_executor_backend="ray",
        tensor_parallel_size=tp, pipeline_parallel_size=pp,
    )  # fmt: skip
    assert result["texts"] == alone
    assert result["ranks"] == list(range(tp * pp))
    deadline = time.monotonic() + 10
    while processes_named("ray") - before:
        assert time.monotonic() < deadline, "processes of Ray are left behind"
        time.sleep(0.05)
    assert not list(Path(tempfile.gettempdir()).glob("headrace-ray-*"))


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_two_machines(
    model: Path, alone: list[list[int]], tmp_path: Path, tp: int, pp: int
) -> None:
    """Both are this one; `serve --headless` is the second, and ends with the first."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    key = str(tmp_path / "key")
    headrace = [sys.executable, "-P", "-m", "headrace"]
    subprocess.run([*headrace, "doctor", "--make-key", key], check=True)
    agent = subprocess.Popen(
        [*headrace, "serve", str(model), "--headless", "--nnodes", "2", "--node-rank", "1",
         "-tp", str(tp), "-pp", str(pp), "--master-port", str(port), "--cluster-key-file", key,
         "--max-model-len", "64"],
    )  # fmt: skip
    try:
        (result,) = run(
            model, tmp_path, tensor_parallel_size=tp, pipeline_parallel_size=pp, nnodes=2,
            master_port=port, cluster_key_file=key,
        )  # fmt: skip
        assert result["texts"] == alone
        assert agent.wait(10) == 0
    finally:
        agent.kill()
        agent.wait()


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_torchrun(model: Path, alone: list[list[int]], tmp_path: Path, tp: int, pp: int) -> None:
    """Every process has all outputs."""
    launcher = ("-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    results = run(
        model, tmp_path, launcher, distributed_executor_backend="external_launcher",
        tensor_parallel_size=tp, pipeline_parallel_size=pp,
    )  # fmt: skip
    assert [result["texts"] for result in results] == [alone, alone]
    assert [result["ranks"] for result in results] == [[0], [1]]


def test_one_host_listens_for_http_only(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Two replicas of two workers each; Gloo's ports are on the loopback interface."""
    model = tiny_model.save_tiny_model(tmp_path_factory.mktemp("model"))
    with tempfile.TemporaryDirectory(prefix="ports") as temp:  # a short path, for sockets
        server = ServerProcess(
            model, Path(temp), "-tp", "2", "-dp", "2", "--host", "0.0.0.0", "--dtype", "float32",
            "--num-gpu-blocks-override", "64",
        )  # fmt: skip
        try:
            answer = server.complete(prompt=[256, 1], max_tokens=4)
            assert answer.status_code == 200
            places = {
                connection.laddr
                for process in server.everyone
                for connection in process.net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN
            }
            num_workers = sum(
                "headrace.executors" in " ".join(p.cmdline()) for p in server.children
            )
        finally:
            server.kill()
    assert num_workers == 4
    assert ("0.0.0.0", server.port) in places
    assert {ip for ip, port in places if port != server.port} <= {"127.0.0.1", "::1"}
