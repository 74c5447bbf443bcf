"""`headrace collect-env`: what is in the report, and what must not be."""

import pytest

from headrace.frontend.cli.collect_env import visible_variables
from headrace.frontend.cli.main import main


def test_secrets_are_hidden_and_other_variables_left_out():
    shown = visible_variables(
        {
            "HEADRACE_API_KEY": "s3cret",
            "HEADRACE_CACHE": "/models",
            "HF_TOKEN": "s3cret",
            "HF_ENDPOINT": "https://user:s3cret@mirror.example/x",
            "OMP_NUM_THREADS": "2",
            "HOME": "/home/someone",
            "MY_PROMPT": "s3cret",
        }
    )
    assert shown == {
        "HEADRACE_API_KEY": "(set, hidden)",
        "HEADRACE_CACHE": "/models",
        "HF_ENDPOINT": "https://(hidden)@mirror.example/x",
        "HF_TOKEN": "(set, hidden)",
        "OMP_NUM_THREADS": "2",
    }


@pytest.mark.slow
def test_report(monkeypatch, capsys):
    monkeypatch.setenv("HEADRACE_API_KEY", "s3cret")
    assert main(["collect-env"]) == 0
    text = capsys.readouterr().out
    for section in (
        "system:", "processors and memory:", "packages:", "optional packages:", "torch:",
        "native kernels:", "variables:", "models in the cache:",
    ):  # fmt: skip
        assert f"\n{section}\n" in f"\n{text}"
    for fact in ("headrace:", "threads headrace uses:", "HEADRACE_API_KEY:", "smollm2-135m:"):
        assert fact in text
    assert "s3cret" not in text and "cannot be used" not in text
