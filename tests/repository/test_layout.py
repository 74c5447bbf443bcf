"""The shape of the repository: layering, packages, public names, sizes, forbidden calls."""

import ast
import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("configs", "kernels", "workers", "executors", "engine_core", "frontend")
# folder -> modules of ours that it may import (by prefix); its own folder is always allowed
MAY_IMPORT = {
    "configs": (),
    "kernels": ("headrace.configs",),
    "workers": ("headrace.configs", "headrace.kernels"),
    "executors": ("headrace.configs", "headrace.workers.protocol"),
    "engine_core": ("headrace.configs", "headrace.workers.protocol", "headrace.executors"),
    "frontend": (
        "headrace.configs",
        "headrace.engine_core.messages",
        "headrace.engine_core.client",
        "headrace.engine_core.supervisor",
        "headrace.engine_core.control_messages",
        "headrace.executors.child_process",  # `serve` starts API servers, too
        "headrace.executors.preflight",  # `doctor` shows what it finds
        "headrace.executors.node_agent",  # `serve --headless` runs it
        "headrace.workers.protocol",  # the wire types that messages are made of
    ),
}
TORCH_FREE = ("configs", "executors", "engine_core", "frontend", "headrace")
HEAVY = ("torch", "transformers")
PUBLIC_NAMES = (  # of vLLM's package, in its order
    "__version__", "__version_tuple__", "LLM", "ModelRegistry", "PromptType", "TextPrompt",
    "TokensPrompt", "SamplingParams", "RequestOutput", "CompletionOutput", "PoolingOutput",
    "PoolingRequestOutput", "EmbeddingOutput", "EmbeddingRequestOutput", "ClassificationOutput",
    "ClassificationRequestOutput", "ScoringOutput", "ScoringRequestOutput", "LLMEngine",
    "EngineArgs", "AsyncLLMEngine", "AsyncEngineArgs", "initialize_ray_cluster", "PoolingParams",
)  # fmt: skip
ALIASES = (
    ("sampling_params", "SamplingParams", "configs.sampling_params"),
    ("sampling_params", "BeamSearchParams", "configs.sampling_params"),
    ("outputs", "RequestOutput", "frontend.outputs"),
    ("inputs", "TokensPrompt", "frontend.inputs"),
    ("engine.arg_utils", "AsyncEngineArgs", "configs.engine_args"),
    ("engine.llm_engine", "LLMEngine", "frontend.llm_engine"),
    ("engine.async_llm_engine", "AsyncLLMEngine", "frontend.async_llm_engine"),
    ("entrypoints.llm", "LLM", "frontend.llm"),
)
# The one place for callables that a program sends to the workers of its own engine core (rule S1).
MAY_PICKLE = "executors/worker_calls.py"
MAX_LINES = 700
MAX_FUNCTION_LINES = 80


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def imports(path: Path) -> list[str]:
    """Modules that a file imports anywhere, with `from x import y` as x."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.append(node.module or "")
    return names


@pytest.mark.parametrize("folder", FOLDERS)
def test_layering(folder: str) -> None:
    allowed = (f"headrace.{folder}", *MAY_IMPORT[folder])
    for path in python_files(folder):
        for module in imports(path):
            assert module.split(".")[0] not in FOLDERS, f"{path}: bare import of {module}"
            if module == "headrace" or not module.startswith("headrace"):
                continue
            assert any(module == a or module.startswith(a + ".") for a in allowed), (
                f"{path.relative_to(ROOT)} imports {module}"
            )


def test_torch_stays_out_of_the_front() -> None:
    for path in python_files(*TORCH_FREE):
        heavy = [m for m in imports(path) if m.split(".")[0] in HEAVY]
        assert not heavy, f"{path.relative_to(ROOT)} imports {heavy}"


def test_package_list_matches_the_tree() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = {"headrace"}
    for path in python_files(*FOLDERS):
        if path.name == "__init__.py":
            found.add("headrace." + ".".join(path.parent.relative_to(ROOT).parts))
    for path in (ROOT / "headrace").rglob("*/__init__.py"):
        found.add(".".join(path.parent.relative_to(ROOT).parts))
    assert set(config["tool"]["setuptools"]["packages"]) == found
    folders_with_code = {p.parent for p in python_files(*FOLDERS)}
    assert all((folder / "__init__.py").exists() for folder in folders_with_code)


def test_public_names_exist() -> None:
    import headrace

    assert headrace.__all__ == [name for name in PUBLIC_NAMES if name not in headrace.NOT_HERE_YET]
    assert set(headrace.NOT_HERE_YET) < set(PUBLIC_NAMES)
    for name in headrace.__all__:
        value = getattr(headrace, name)
        assert getattr(headrace, name) is value
    assert set(headrace.MODULE_ATTRS) == set(headrace.__all__) - {
        "__version__",
        "__version_tuple__",
    }
    with pytest.raises(AttributeError, match=r"headrace.*NoSuchName"):
        _ = headrace.NoSuchName
    with pytest.raises(AttributeError, match=r"headrace.*PoolingParams.*not in this version"):
        _ = headrace.PoolingParams


@pytest.mark.parametrize(("module", "name", "home"), ALIASES)
def test_alias_modules(module: str, name: str, home: str) -> None:
    alias = getattr(importlib.import_module(f"headrace.{module}"), name)
    assert alias is getattr(importlib.import_module(f"headrace.{home}"), name)
    text = Path(importlib.import_module(f"headrace.{module}").__file__ or "").read_text()
    body = ast.parse(text).body
    assert all(isinstance(node, ast.Expr | ast.ImportFrom | ast.Assign) for node in body)


def test_version_is_said_once() -> None:
    import headrace

    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert config["project"]["version"] == headrace.__version__
    assert ".".join(map(str, headrace.__version_tuple__)) == headrace.__version__


def test_file_and_function_sizes() -> None:
    for path in python_files(*FOLDERS, "headrace", "scripts", "tests"):
        text = path.read_text()
        assert text.count("\n") <= MAX_LINES, f"{path.relative_to(ROOT)} is too long"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
                lines = node.end_lineno - node.lineno + 1
                assert lines <= MAX_FUNCTION_LINES, f"{path.name}: {node.name} has {lines} lines"


def test_no_code_carrying_serialization_or_evaluation() -> None:
    """Rules S1, S4, S6: nothing reads pickles, loads torch checkpoints or evaluates text."""
    banned_modules = {"pickle", "dill", "marshal", "shelve", "cloudpickle"}
    banned_calls = {"eval", "exec", "compile", "recv_pyobj", "send_pyobj"}
    for path in python_files(*FOLDERS, "headrace", "scripts"):
        if path.relative_to(ROOT).as_posix() != MAY_PICKLE:
            for module in imports(path):
                assert module.split(".")[0] not in banned_modules, f"{path}: imports {module}"
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = node.func
            if isinstance(name, ast.Name):
                assert name.id not in banned_calls, f"{path}:{node.lineno} calls {name.id}"
            if isinstance(name, ast.Attribute):
                full = ast.unparse(name)
                assert full != "torch.load" and name.attr not in {"recv_pyobj", "send_pyobj"}, (
                    f"{path}:{node.lineno} calls {full}"
                )


CALL_HELP = (
    "import sys; sys.argv = {}\n"
    "import headrace.__main__\n"
    "try:\n    headrace.__main__.main()\nexcept SystemExit as stop:\n    assert not stop.code"
)
HELP_OR_IMPORT = (
    ("import headrace", "import headrace"),
    ("headrace --help", CALL_HELP.format(["headrace", "--help"])),
    # What it imports comes before its engine process starts.
    ("headrace serve --help", CALL_HELP.format(["headrace", "serve", "--help"])),
)


@pytest.mark.parametrize(("name", "code"), HELP_OR_IMPORT, ids=[n for n, _ in HELP_OR_IMPORT])
def test_cheap_imports(name: str, code: str) -> None:
    check = (
        f"{code}\nimport sys\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'openai', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
