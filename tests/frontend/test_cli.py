"""The command line: quick help, exit codes, hints, the clients against a small server."""

import http.server
import io
import json
import socket
import subprocess
import sys
import threading
import time

import pytest

from headrace.frontend.cli.main import main

HEAVY = ("torch", "transformers", "fastapi", "openai")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in ("HEADRACE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "program",
    [
        "import headrace",
        "from headrace.frontend.cli.main import main; main([])",
        "from headrace.frontend.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0",
    ],
)
def test_help_and_import_are_quick(program):
    """PP02: best of three under half a second, and nothing heavy is imported."""
    check = f"{program}\nimport sys\nfor name in {HEAVY}: assert name not in sys.modules, name"
    times = []
    for _ in range(3):
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", check], check=True, stdout=subprocess.DEVNULL)
        times.append(time.monotonic() - began)
    assert min(times) < 0.5


def exit_code(*argv: str) -> int:
    try:
        return main(list(argv))
    except SystemExit as end:
        return int(end.code or 0)


def test_help(capsys):
    assert exit_code("--help") == 0
    text = capsys.readouterr().out
    for word in ("serve", "chat", "complete", "pull", "examples:"):
        assert word in text
    assert exit_code() == 2


@pytest.mark.parametrize("command", ["serve", "chat", "complete", "pull"])
def test_help_of_commands(command, capsys):
    assert exit_code(command, "--help") == 0
    text = capsys.readouterr().out
    assert "--help" in text
    if command != "pull":
        assert "--max-model-len" in text and "MODEL" in text and "examples:" in text


def test_version(capsys):
    assert exit_code("--version") == 0
    assert capsys.readouterr().out.startswith("headrace 0.")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve", "--prot", "3"], "did you mean --port?"),
        (["serve", "--max-modl-len", "3"], "did you mean --max-model-len?"),
        (["serv"], "invalid choice"),
        (["serve", "--port", "x"], "invalid int"),
        (["chat", "-q"], "expected one argument"),
    ],
)
def test_wrong_arguments(argv, message, capsys):
    assert exit_code(*argv) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_configuration_errors_are_one_line(capsys, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert exit_code("serve", "--port", str(port)) == 2
    error = capsys.readouterr().err
    assert error.startswith("headrace: error: cannot listen") and str(port) in error
    assert error.count("\n") == 1
    monkeypatch.setenv("HEADRACE_NOPE", "1")
    assert exit_code("chat", "-q", "a") == 2
    assert "HEADRACE_NOPE" in capsys.readouterr().err


def test_underscores_in_flags_are_dashes(capsys):
    assert exit_code("serve", "--max_model_len=x") == 2
    assert "--max-model-len: 'x' is not a number" in capsys.readouterr().err


class FakeApi(http.server.BaseHTTPRequestHandler):
    """Streams two pieces; refuses the word "bad"; fails in the middle at the word "late"."""

    def do_GET(self):
        self.answer(200, "application/json", b'{"data": [{"id": "first-model"}]}')

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, body, self.headers["Authorization"]))
        if "bad" in json.dumps(body):
            self.answer(400, "application/json", b'{"error": {"message": "no bad words"}}')
            return
        events = []
        for piece in ("Par", "is."):
            choice = {"delta": {"content": piece}} if "chat" in self.path else {"text": piece}
            events.append({"choices": [choice]})
        if "late" in json.dumps(body):
            events[1] = {"error": {"message": "it broke"}}
        data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
        self.answer(200, "text/event-stream", data + b"data: [DONE]\n\n")

    def answer(self, status, kind, data):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def api():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeApi)
    server.seen = []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_quick_chat_over_a_server(api, capsys):
    argv = ["chat", "--url", api.url, "-q", "capital?", "--system-prompt", "short"]
    argv += ["--stats", "--temperature", "0"]
    assert exit_code(*argv) == 0
    printed = capsys.readouterr()
    assert printed.out == "Paris.\n" and "2 pieces" in printed.err
    path, body, key = api.seen[0]
    assert path == "/v1/chat/completions" and body["model"] == "first-model" and body["stream"]
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert body["temperature"] == 0 and "max_tokens" not in body
    assert key == "Bearer EMPTY"


def test_conversation_keeps_its_history_and_ends_at_end_of_file(api, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\n"))
    monkeypatch.setenv("OPENAI_API_KEY", "from-environment")
    assert exit_code("chat", "--url", api.url) == 0
    assert capsys.readouterr().out == "Paris.\nParis.\n"
    assert [message["content"] for message in api.seen[1][1]["messages"]] == [
        "one", "Paris.", "two",
    ]  # fmt: skip
    assert api.seen[1][2] == "Bearer from-environment"


def test_interrupt_ends_a_conversation_with_code_0(api, monkeypatch):
    def interrupted(prompt):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    assert exit_code("chat", "--url", api.url) == 0
    assert exit_code("complete", "--url", api.url) == 0


def test_complete_over_a_server(api, capsys):
    argv = ["complete", "--url", api.url + "/", "--model-name", "m", "--api-key", "k"]
    assert exit_code(*argv, "-q", "The capital is", "--max-tokens", "4") == 0
    assert capsys.readouterr().out == "Paris.\n"
    assert api.seen[0] == (
        "/v1/completions",
        {"model": "m", "stream": True, "prompt": "The capital is", "max_tokens": 4},
        "Bearer k",
    )


def test_a_server_is_asked_for_the_model_that_is_named(api):
    assert exit_code("chat", "mine", "--url", api.url, "-q", "a") == 0
    assert api.seen[0][1]["model"] == "mine"


def test_engine_options_are_not_for_a_server(api, capsys):
    assert exit_code("chat", "--url", api.url, "-q", "a", "--max-num-seqs", "3") == 2
    assert "--max-num-seqs is an option of an engine" in capsys.readouterr().err
    assert api.seen == []


@pytest.mark.parametrize(
    ("text", "message"), [("bad", "answered 400: no bad words"), ("late", "it broke")]
)
def test_refusals_are_one_line(api, capsys, text, message):
    assert exit_code("chat", "--url", api.url, "-q", text) == 1
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_no_server_there(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert exit_code("chat", "--url", f"http://127.0.0.1:{port}/v1", "-q", "a") == 1
    assert "is the server running there?" in capsys.readouterr().err
    assert exit_code("chat", "--url", "localhost:3", "-q", "a") == 2
