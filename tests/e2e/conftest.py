"""Servers on the real model that tests share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.server_process import ServerProcess

SMALL_STEPS = ("--max-num-batched-tokens", "64", "--max-num-seqs", "8")  # a quick warm-up, too
StartServer = Callable[..., ServerProcess]


@pytest.fixture(scope="session")
def server(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """SmolLM2 in float32, in small steps: at most 64 tokens and 8 sequences in each."""
    shared = ServerProcess(
        smollm2_gguf, tmp_path_factory.mktemp("s"), "--dtype", "float32",
        *SMALL_STEPS,
    )  # fmt: skip
    yield shared
    shared.kill()


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """`start_server(model, *options)` starts a server of the test's own, in small steps."""
    servers: list[ServerProcess] = []

    def start(model: Path, *options: str, wait_ready: bool = True) -> ServerProcess:
        servers.append(
            ServerProcess(model, tmp_path, *SMALL_STEPS, *options, wait_ready=wait_ready)
        )
        return servers[-1]

    yield start
    for started in servers:
        started.kill()
