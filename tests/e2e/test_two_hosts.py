"""Two hosts made of network namespaces: the same texts, and nothing listens anywhere else."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from tests.e2e import tiny_model
from tests.e2e.test_parallel_backends import run
from tests.e2e.tiny_engine import save_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

HOSTS = {"headrace-a": "10.177.0.1", "headrace-b": "10.177.0.2"}
FIRST, SECOND = HOSTS
# A process namespace of its own: the second host's processes cannot see the first's.
AS_FIRST = ("ip", "netns", "exec", FIRST)
AS_SECOND = (
    *("ip", "netns", "exec", SECOND),
    *("unshare", "--pid", "--fork", "--mount-proc", "--kill-child"),
)
FIRST_IN_PROC = "0100B10A"
PORT = 8000
BODIES: tuple[dict[str, Any], ...] = (
    {"prompt": [256, 72, 101, 108, 108, 111], "max_tokens": 24, "temperature": 0},
    {"prompt": [256, 87, 111, 114, 108, 100], "max_tokens": 24, "temperature": 1.0, "seed": 5},
)
# Asks the servers in argv[2:] for what argv[1] lists: their answers, and their replica's rank.
CLIENT = """
import json, re, sys, time
import httpx

found = []
with httpx.Client(trust_env=False, timeout=60) as client:
    for url in sys.argv[2:]:
        for _ in range(600):
            try:
                if client.get(f"{url}/health/ready").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        answers = [
            client.post(f"{url}/v1/completions", json=body | {"ignore_eos": True})
            for body in json.loads(sys.argv[1])
        ]
        texts = [answer.raise_for_status().json()["choices"][0]["text"] for answer in answers]
        metrics = client.get(f"{url}/metrics").text
        (rank,) = set(re.findall(r'num_requests_running{engine="(.*?)"', metrics))
        found.append({"texts": texts, "rank": rank})
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[None]:
    """Two namespaces with a cable between them."""
    if os.geteuid() or not all(map(shutil.which, ("ip", "ss", "unshare"))):
        pytest.skip("network namespaces need root, ip, ss and unshare")
    try:
        _ip("netns", "add", FIRST)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace can be made: {error.stderr}")
    try:
        _ip("netns", "add", SECOND)
        _ip("link", "add", "cable-a", "netns", FIRST, "type", "veth",
            "peer", "name", "cable-b", "netns", SECOND)  # fmt: skip
        for end, (name, address) in zip(("cable-a", "cable-b"), HOSTS.items(), strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name in HOSTS:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    (result,) = run(model, tmp_path_factory.mktemp("alone"))
    texts: list[list[int]] = result["texts"]
    return texts


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_mp(model: Path, alone: list[list[int]], tmp_path: Path, tp: int, pp: int) -> None:
    key = str(tmp_path / "key")
    headrace = [sys.executable, "-P", "-m", "headrace"]
    subprocess.run([*headrace, "doctor", "--make-key", key], check=True)
    agent = subprocess.Popen(
        [*AS_SECOND, *headrace, "serve", str(model), "--headless", "--nnodes", "2",
         "--node-rank", "1", "-tp", str(tp), "-pp", str(pp), "--master-addr", HOSTS[FIRST],
         "--cluster-key-file", key, "--max-model-len", "64"],
    )  # fmt: skip
    try:
        (result,) = run(
            model, tmp_path, before=AS_FIRST, tensor_parallel_size=tp, pipeline_parallel_size=pp,
            nnodes=2, master_addr=HOSTS[FIRST], cluster_key_file=key,
        )  # fmt: skip
        assert agent.wait(20) == 0
    finally:
        agent.kill()
        agent.wait()
    assert result["texts"] == alone
    assert set(result["listening"]) == {FIRST_IN_PROC}


@pytest.mark.usefixtures("hosts")
def test_ray(model: Path, alone: list[list[int]], tmp_path: Path) -> None:
    """A node of one CPU on each host."""
    pytest.importorskip("ray", reason="Ray is not installed (the extra `ray`)")
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1",
           "--disable-usage-stats", "--object-store-memory=80000000"]  # fmt: skip
    environ = os.environ | {"RAY_AUTH_MODE": "disabled"}
    directory = tempfile.mkdtemp(prefix="ray")  # a short path, for sockets
    nodes = []
    address = f"{HOSTS[FIRST]}:6379"
    try:
        for command in (
            [*AS_FIRST, *ray, "--head", "--port=6379", f"--node-ip-address={HOSTS[FIRST]}",
             "--include-dashboard=false", f"--temp-dir={directory}/a"],
            [*AS_SECOND, *ray, f"--address={address}", f"--node-ip-address={HOSTS[SECOND]}"],
        ):  # fmt: skip
            nodes.append(subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_AUTH_MODE", "disabled")
            (result,) = run(
                model, tmp_path, before=(*AS_FIRST, "env", f"RAY_ADDRESS={address}"),
                distributed_executor_backend="ray",
                tensor_parallel_size=2,
            )  # fmt: skip
    finally:
        for node in nodes[1:]:
            node.kill()  # and with it everything in its process namespace
            node.wait()
        for node in nodes[:1]:
            node.terminate()
            try:
                node.wait(20)
            except subprocess.TimeoutExpired:
                node.kill()
                node.wait()
        shutil.rmtree(directory, ignore_errors=True)
    assert result["texts"] == alone
    assert result["ranks"] == [0, 1]


@pytest.mark.usefixtures("hosts")
def test_replicas(tmp_path: Path) -> None:
    """One on each host, with an endpoint of its own; a client of the first reaches both."""
    model = tiny_model.save_tiny_model(tmp_path / "model")
    params = [
        SamplingParams(
            max_tokens=body["max_tokens"], temperature=body["temperature"], seed=body.get("seed"),
            ignore_eos=True,
        )
        for body in BODIES
    ]  # fmt: skip
    prompts = [{"prompt_token_ids": body["prompt"]} for body in BODIES]
    llm = LLM(str(model), **tiny_model.ENGINE_ARGUMENTS)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.close()
    texts = [output.outputs[0].text for output in outputs]
    servers = []
    try:
        for rank, (before, address) in enumerate(
            zip((AS_FIRST, AS_SECOND), HOSTS.values(), strict=True)
        ):
            command = [
                *before, sys.executable, "-P", "-m", "headrace", "serve", str(model),
                "--data-parallel-size", "2", "--data-parallel-rank", str(rank),
                "--host", address, "--port", str(PORT), "--dtype", "float32",
                "--num-gpu-blocks-override", "64",
            ]  # fmt: skip
            servers.append(subprocess.Popen(command))
        urls = [f"http://{address}:{PORT}" for address in HOSTS.values()]
        client = subprocess.run(
            [*AS_FIRST, sys.executable, "-P", "-c", CLIENT, json.dumps(BODIES), *urls],
            stdout=subprocess.PIPE, check=True, timeout=100,
        )  # fmt: skip
        assert json.loads(client.stdout) == [{"texts": texts, "rank": str(i)} for i in (0, 1)]
        for name, address in HOSTS.items():
            assert _listening(name) == {f"{address}:{PORT}"}
    finally:
        for server in servers:
            server.kill()
            server.wait()


def _listening(name: str) -> set[str]:
    """What `ss -ltn` shows on that host."""
    command = ["ip", "netns", "exec", name, "ss", "-Hltn"]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return {line.split()[3] for line in lines.splitlines()}


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
