"""`headrace doctor`: what it finds, and what it tells to do."""

import os
from pathlib import Path

import pytest

from headrace.configs.config import ParallelConfig
from headrace.executors import preflight
from headrace.executors.worker_hub import DeploymentKey
from headrace.frontend.cli.main import main


def test_make_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.key"
    assert main(["doctor", "--make-key", str(path)]) == 0
    assert path.stat().st_mode & 0o777 == 0o600
    DeploymentKey.read(str(path))
    assert "copy it to every machine" in capsys.readouterr().out
    assert main(["doctor", "--make-key", str(path)]) == 2


def test_too_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = os.statvfs("/")
    monkeypatch.setattr(preflight, "MIN_SHM_BYTES", usage.f_frsize * usage.f_blocks << 20)
    check = preflight._shared_memory()
    assert "--shm-size" in check.fix and "MiB free of" in check.found
    monkeypatch.setattr(preflight, "SHM", "/no/such/place")
    assert preflight._shared_memory().fix == "mount a tmpfs at /no/such/place"


@pytest.mark.slow
def test_two_workers_here(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "-tp", "2"])
    out = capsys.readouterr().out
    for words in ("rank 0 (stage 0, shard 0)", "rank 0 - rank 1: ", " MB/s", "sum of 2 shards"):
        assert words in out, out
    assert code == int("fix:" in out)


@pytest.mark.slow
def test_workers_that_cannot_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fix is named."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface0")
    parallel = ParallelConfig(
        tensor_parallel_size=2, distributed_executor_backend="mp", start_timeout_s=20.0
    )
    *_, last = preflight.run_checks(parallel)
    assert last.name == "workers"
    assert "GLOO_SOCKET_IFNAME=no-such-interface0 is set: unset it" in last.fix
