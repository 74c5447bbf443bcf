"""Run directories: private, short, removed, reclaimed after a kill."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.configs.errors import ConfigurationError
from headrace.configs.process_times import process_creation_time, process_start_time
from headrace.engine_core.run_directory import RunDirectory


def test_private_and_removed(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(run.path.parent.stat().st_mode) == 0o700
    run.remove()
    run.remove()
    assert not run.path.exists()


def test_two_runs_do_not_meet(tmp_path: Path) -> None:
    first, second = RunDirectory(tmp_path), RunDirectory(tmp_path)
    assert first.path != second.path
    assert first.path.exists()
    first.remove()
    assert second.path.exists()
    second.remove()


def test_killed_run_is_reclaimed_and_a_live_one_is_not(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from headrace.engine_core.run_directory import RunDirectory\n"
        "run = RunDirectory(Path(sys.argv[1]))\nprint(run.path, flush=True)\ntime.sleep(60)"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    paths = [Path(child.stdout.readline().strip()) for child in children if child.stdout]
    children[0].send_signal(signal.SIGKILL)
    children[0].wait()
    run = RunDirectory(tmp_path)
    assert not paths[0].exists()
    assert paths[1].exists()
    children[1].kill()
    children[1].wait()
    run.remove()
    for child in children:
        assert child.stdout is not None
        child.stdout.close()


def test_foreign_base_is_refused(tmp_path: Path) -> None:
    base = tmp_path / f"headrace-{os.getuid()}"
    base.mkdir(mode=0o755)
    base.chmod(0o755)
    with pytest.raises(ConfigurationError, match="0700"):
        RunDirectory(tmp_path)


def test_socket_path_limit(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert run.socket_path("a.sock").parent == run.path
    with pytest.raises(ConfigurationError, match="TMPDIR"):
        run.socket_path("x" * 120)
    run.remove()


def test_process_times() -> None:
    assert process_start_time(os.getpid()) is not None
    assert process_start_time(2**22 + 1) is None
    import time

    assert 0 <= time.time() - process_creation_time(os.getpid()) < 3600
