"""Two hosts made of network namespaces: the same texts, and nothing listens anywhere else."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

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


@pytest.fixture(scope="module")
def hosts() -> Iterator[None]:
    """Two namespaces with a cable between them."""
    if os.geteuid() or not all(map(shutil.which, ("ip", "unshare"))):
        pytest.skip("network namespaces need root, ip and unshare")
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
        for node in reversed(nodes):
            node.terminate()
            try:
                node.wait(20)
            except subprocess.TimeoutExpired:
                node.kill()
                node.wait()
        shutil.rmtree(directory, ignore_errors=True)
    assert result["texts"] == alone
    assert result["ranks"] == [0, 1]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
