"""Hub ids against a small hub on loopback, each in its own process: HF_ENDPOINT is read once."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TOKEN = "hf_secretSECRETsecretSECRETsecret"
SHA = {"main": "a" * 40, "v2": "b" * 40}
WEIGHTS = bytes(range(256)) * 94_000  # 24 MB: the client keeps what it has in steps of 10 MB


def repository(revision: str) -> dict[str, bytes]:
    return {
        "config.json": json.dumps({"revision": revision}).encode(),
        "generation_config.json": b"{}",
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b"{}",
        "chat_template.jinja": b"x",
        "model.safetensors": WEIGHTS,
        "model.gguf": b"GGUF",
        "README.md": b"not needed",
        "pytorch_model.bin": b"not needed",
        "consolidated.safetensors": b"the same weights again",
        "onnx/model.safetensors": b"not needed",
        "run.py": b"not needed",
    }


class Answer(http.server.BaseHTTPRequestHandler):
    """Answers for the hub that its server belongs to."""

    protocol_version = "HTTP/1.1"
    server: "Server"

    def do_GET(self) -> None:
        self.server.hub.requests.append((self.command, self.path, self.headers.get("Range")))
        self.server.hub.tokens.append(self.headers.get("Authorization"))
        path = self.path.split("?")[0].strip("/").split("/")
        repo = "/".join(path[2:4] if path[0] == "api" else path[:2])
        if problem := self.server.hub.problem(repo):
            status, headers = problem
            return self.reply(status, b'{"error": "no"}', headers)
        if path[0] == "api":
            return self.api(path[4:])
        return self.file(path[3], "/".join(path[4:]))

    do_HEAD = do_GET

    def api(self, rest: list[str]) -> None:
        revision = rest[1] if len(rest) > 1 else "main"
        sha = SHA.get(revision, revision)
        if sha not in SHA.values():
            return self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        files = repository(sha)
        if rest and rest[0] == "tree":
            body: object = [
                {"type": "file", "path": name, "size": len(data), "oid": etag(data)}
                for name, data in files.items()
            ]
        else:
            siblings = [{"rfilename": name} for name in files]
            body = {"id": "org/name", "sha": sha, "siblings": siblings}
        return self.reply(200, json.dumps(body).encode(), {})

    def file(self, revision: str, name: str) -> None:
        sha = SHA.get(revision, revision)
        data = repository(sha).get(name)
        if data is None:
            return self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
        headers = {
            "ETag": f'"{etag(data)}"',
            "X-Repo-Commit": sha,
            "Accept-Ranges": "bytes",
        }
        cut = self.server.hub.cut_once and name == "model.safetensors" and self.command == "GET"
        if cut:
            self.server.hub.cut_once = False
        requested = self.headers.get("Range")
        if requested and self.command == "GET":
            start = int(requested.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            return self.reply(206, data[start:], headers, cut=cut)
        return self.reply(200, data, headers, cut=cut)

    def reply(
        self, status: int, body: bytes, headers: dict[str, str], *, cut: bool = False
    ) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.wfile.flush()
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    hub: "Hub"

    def handle_error(self, request: object, client_address: object) -> None:
        pass


class Hub:
    """Answers huggingface_hub; `cut_once` breaks the first transfer of the weights half-way."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, str | None]] = []  # method, path, Range
        self.tokens: list[str | None] = []
        self.cut_once = False

        self.server = Server(("127.0.0.1", 0), Answer)
        self.server.hub = self
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def problem(self, repo: str) -> tuple[int, dict[str, str]] | None:
        problems: dict[str, tuple[int, dict[str, str]]] = {
            "org/hidden": (401, {"X-Error-Code": "RepoNotFound"}),
            "org/badtoken": (
                401,
                {"X-Error-Message": "Invalid credentials in Authorization header"},
            ),
            "org/gated": (403, {"X-Error-Code": "GatedRepo"}),
            "org/gated-anonymous": (401, {"X-Error-Code": "GatedRepo"}),
            "org/forbidden": (403, {}),
            "org/missing": (404, {"X-Error-Code": "RepoNotFound"}),
            "org/broken": (500, {}),
        }
        return problems.get(repo)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    yield hub
    hub.close()


CODE = """
import json, sys
from headrace.configs.errors import ModelFileError
from headrace.configs.model_files.resolve import resolve_model

name, options = json.loads(sys.argv[1])
try:
    print(resolve_model(name, **options))
except ModelFileError as error:
    sys.exit(f"ModelFileError: {error}")
"""


def resolve(
    name: str, home: Path, url: str, environ: dict[str, str] | None = None, **options: object
) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    return subprocess.run(
        [sys.executable, "-c", CODE, json.dumps([name, options])],
        env=inherited
        | {
            "HF_ENDPOINT": url,
            "HF_HOME": str(home),
            "NO_PROXY": "127.0.0.1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        | (environ or {}),
        capture_output=True,
        text=True,
        timeout=120,
    )


def path_of(result: subprocess.CompletedProcess[str]) -> Path:
    assert result.returncode == 0, result.stderr
    return Path(result.stdout.strip())


def error_of(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr and TOKEN not in result.stderr + result.stdout
    return result.stderr[result.stderr.index("ModelFileError: ") :]


def test_only_what_is_read_is_fetched(hub: Hub, tmp_path: Path) -> None:
    snapshot = path_of(resolve("org/name", tmp_path, hub.url, token=TOKEN))
    files = {str(file.relative_to(snapshot)) for file in snapshot.rglob("*") if file.is_file()}
    assert files == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors",
    }
    assert (snapshot / "model.safetensors").read_bytes() == WEIGHTS
    assert set(hub.tokens) == {f"Bearer {TOKEN}"}

    # Offline, the same name is found in the cache; another one is not.
    offline = {"HF_HUB_OFFLINE": "1"}
    assert path_of(resolve("org/name", tmp_path, hub.url, offline)) == snapshot
    message = error_of(resolve("org/other", tmp_path, hub.url, offline))
    assert "org/other is not in the hub's cache, and offline mode is on (HF_HUB_OFFLINE)" in message


def test_revision_single_file_and_download_dir(hub: Hub, tmp_path: Path) -> None:
    result = resolve("org/name", tmp_path, hub.url, revision="v2", download_dir=str(tmp_path / "d"))
    snapshot = path_of(result)
    assert snapshot.is_relative_to(tmp_path / "d")
    assert json.loads((snapshot / "config.json").read_text()) == {"revision": SHA["v2"]}
    file = path_of(resolve("org/name:model.gguf", tmp_path, hub.url, token=False))
    assert file.read_bytes() == b"GGUF"
    assert [child.name for child in file.parent.iterdir()] == ["model.gguf"]
    assert hub.tokens[-1] is None
    message = error_of(resolve("org/name:other.gguf", tmp_path, hub.url))
    assert "org/name has no file other.gguf" in message


def test_a_cut_transfer_goes_on_where_it_stopped(hub: Hub, tmp_path: Path) -> None:
    hub.cut_once = True
    result = resolve("org/name", tmp_path, hub.url)
    if result.returncode:  # this version of huggingface_hub leaves the second try to the user
        assert "could not be fetched" in error_of(result)
        result = resolve("org/name", tmp_path, hub.url)
    snapshot = path_of(result)
    assert (snapshot / "model.safetensors").read_bytes() == WEIGHTS
    starts = [
        int(wanted.removeprefix("bytes=").split("-")[0])
        for method, path, wanted in hub.requests
        if method == "GET" and path.endswith("model.safetensors") and wanted
    ]
    assert max(starts) > 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("org/gated", "org/gated is gated (HTTP 403): accept its licence at http"),
        ("org/gated-anonymous", "gated (HTTP 401): accept its licence at http"),
        ("org/forbidden", "gated (HTTP 403)"),
        ("org/hidden", "shows no repository org/hidden to you (HTTP 401)"),
        ("org/badtoken", "refused the token for org/badtoken (HTTP 401)"),
        ("org/missing", "has no repository org/missing (HTTP 404)"),
        ("org/broken", "answered HTTP 500 for org/broken; try again later"),
    ],
)
def test_refusals(name: str, text: str, hub: Hub, tmp_path: Path) -> None:
    message = error_of(resolve(name, tmp_path, hub.url, token=TOKEN))
    assert text in message


def test_unknown_revision_missing_token_and_dead_network(hub: Hub, tmp_path: Path) -> None:
    message = error_of(resolve("org/name", tmp_path, hub.url, revision="v9"))
    assert "org/name has no revision 'v9'" in message
    message = error_of(resolve("org/name", tmp_path, hub.url, token=True))
    assert "a token is required for org/name, but none is stored" in message
    hub.close()
    message = error_of(resolve("org/name", tmp_path, hub.url, token=TOKEN))
    assert f"org/name could not be fetched from {hub.url}" in message
    assert "check the network" in message and len(message) < 500
