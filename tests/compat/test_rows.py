"""No row of the contract is without a test, and every test that a row names exists."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.compat.api_rows import NUM_ROWS, PAGES

ROOT = Path(__file__).parent.parent.parent
NODE_ID = re.compile(r"(tests/[a-z0-9_/]+/test_[a-z0-9_]+\.py)::(test_[a-z0-9_]+)")


@cache
def known_tests(path: str) -> frozenset[str]:
    """Names of a file's test functions, without those that are skipped or expected to fail."""
    body = ast.parse((ROOT / path).read_text()).body
    return frozenset(
        node.name
        for node in body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and not any("mark.skip" in ast.unparse(mark) for mark in node.decorator_list)
        and not any("xfail" in ast.unparse(mark) for mark in node.decorator_list)
    )


@pytest.mark.parametrize("page", PAGES)
def test_every_row_names_tests_that_exist(page: str) -> None:
    for row in PAGES[page][0]:
        assert row.holds and row.tests, f"{row.id} has no test"
        assert len(set(row.tests)) == len(row.tests), f"{row.id} names a test twice"
        for node_id in row.tests:
            match = NODE_ID.fullmatch(node_id)
            assert match, f"{row.id}: {node_id} is not a test's name"
            path, name = match.groups()
            assert (ROOT / path).is_file(), f"{row.id}: there is no {path}"
            assert name in known_tests(path), f"{row.id}: there is no {node_id}"


@pytest.mark.parametrize("page", PAGES)
def test_no_row_is_lost(page: str) -> None:
    rows, counts = PAGES[page]
    assert len({row.id for row in rows}) == len(rows) == sum(counts.values()) == NUM_ROWS[page]
    assert Counter(row.section for row in rows) == counts
    assert list(dict.fromkeys(row.section for row in rows)) == list(counts)  # in order


def test_tables_are_numbered_without_gaps() -> None:
    """The numbered tables of the sampling parameters: 33 fields, 10 steps, 23 checks."""
    rows, _ = PAGES["sampling parameters"]
    for section, last in (("1.1", 33), ("1.2", 10), ("1.3", 23), ("1.5", 3)):
        numbers = [int(n) for row in rows if row.section == section
                   for n in re.findall(r"^\S+ #(\d+)", row.id)]  # fmt: skip
        assert numbers == list(range(1, last + 1))


def test_the_check_sees_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that is not there, is skipped, or is expected to fail does not count."""
    (tmp_path / "test_x.py").write_text(
        "import pytest\n"
        "def test_here(): ...\n"
        "@pytest.mark.skip\ndef test_skipped(): ...\n"
        "@pytest.mark.xfail(reason='x')\ndef test_failing(): ...\n"
        "def helper():\n    def test_inner(): ...\n"
    )
    monkeypatch.setattr("tests.compat.test_rows.ROOT", tmp_path)
    assert known_tests("test_x.py") == {"test_here"}
