"""Names of models: paths first, then aliases, then hub ids."""

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.configs.errors import ModelFileError
from headrace.configs.model_files import resolve
from headrace.configs.model_files.catalog import CATALOG
from headrace.configs.model_files.hub import HubName
from headrace.configs.model_files.resolve import resolve_model

ALIAS = "smollm2-135m"


def test_existing_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    assert resolve_model(str(file)) == file
    assert resolve_model(str(tmp_path)) == file  # the only .gguf file of a directory
    (tmp_path / "n.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match=r"2 \.gguf files.*: m\.gguf, n\.gguf"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/m.gguf") == file


def test_paths_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"neither config\.json nor a \.gguf file"):
        resolve_model(str(tmp_path))
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ModelFileError, match=r"weights\.bin: a file, but not a \.gguf file"):
        resolve_model(str(tmp_path / "weights.bin"))


def test_a_path_comes_before_an_alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ALIAS).mkdir()
    (tmp_path / ALIAS / "config.json").write_text("{}")
    assert resolve_model(ALIAS) == Path(ALIAS)


def test_an_alias_is_pulled_only_when_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    pulled = []

    def pull(entry: object, cache: Path, *, progress: bool) -> Path:
        pulled.append((entry, cache, progress))
        return tmp_path / "pulled.gguf"

    monkeypatch.setattr(resolve, "pull", pull)
    assert resolve_model(ALIAS, progress=False) == tmp_path / "pulled.gguf"
    assert pulled == [(CATALOG[ALIAS], tmp_path, False)]
    there = tmp_path / "models" / CATALOG[ALIAS].file_name
    there.parent.mkdir()
    with there.open("wb") as file:
        file.truncate(CATALOG[ALIAS].size)
    assert resolve_model(ALIAS) == there
    assert len(pulled) == 1


@pytest.mark.parametrize("name", ["smolm2-135", "", "a/b/c", "org/name:x.bin", "/no/such/dir"])
def test_unknown_names(name: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        resolve_model(name)
    message = str(caught.value)
    assert repr(name) in message and "hub id" in message and "existing path" in message
    assert all(alias in message for alias in CATALOG)
    assert ("Did you mean 'smollm2-135m'?" in message) == (name == "smolm2-135")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/name", HubName("org/name")),
        ("org/name-1.5_x", HubName("org/name-1.5_x")),
        ("org/name:m.Q4_0.gguf", HubName("org/name", "m.Q4_0.gguf")),
        ("org/name:sub/m.gguf", HubName("org/name", "sub/m.gguf")),
        ("org/name:../m.gguf", None),
        ("org/name:/m.gguf", None),
        ("org/name:m.bin", None),
        ("name", None),
        ("../name", None),
        ("org/" + "n" * 100, None),
    ],
)
def test_hub_names(name: str, expected: HubName | None) -> None:
    assert HubName.parse(name) == expected


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    heavy = ("huggingface_hub", "tqdm", "torch", "transformers", "tokenizers", "httpx", "numpy")
    code = (
        "import sys\n"
        "from headrace.configs.model_files.resolve import resolve_model\n"
        "import headrace.frontend.cli.pull\n"
        f"resolve_model({str(tmp_path)!r})\n"
        f"sys.exit(', '.join(name for name in {heavy!r} if name in sys.modules) or 0)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
