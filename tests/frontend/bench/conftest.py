"""A mock server with known timings, in a process of its own, for all tests of the benchmarks."""

from collections.abc import Iterator

import pytest

from headrace.frontend.cli.bench.http_target import Target
from headrace.frontend.cli.bench.self_check import mock_target
from headrace.frontend.cli.main import main


@pytest.fixture(scope="session")
def mock() -> Iterator[Target]:
    with mock_target() as target:
        yield target


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEADRACE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def headrace_command():
    """Run a command line in this process; returns the exit code."""

    def run(*argv: object) -> int:
        try:
            return main([str(word) for word in argv])
        except SystemExit as end:
            return int(end.code or 0)

    return run
