"""Over real sockets: disconnects, streams as they come, the official client."""

import contextlib
import json
import shutil
import socket
import ssl
import subprocess
import time

import httpx
import openai
import pytest

from headrace.configs.errors import ConfigurationError
from headrace.frontend.http.listener import ServerOptions, Tls, bind_socket, listening, url_of
from headrace.frontend.http.request_ids import RequestIdEcho


def send_request(port, body, path="/v1/completions"):
    """A socket on which a request has been sent."""
    data = json.dumps(body).encode()
    client = socket.create_connection(("127.0.0.1", port))
    client.sendall(
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n".encode()
        + data
    )
    return client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["queued", "decoding"])
def test_disconnect_aborts(live_server, scripted, until, stream, phase):
    """Within 100 ms, whether or not anything has been sent."""
    engine = scripted(delay_s=0.05)
    server = live_server(engine)
    if phase == "queued":
        import asyncio

        engine.hold = asyncio.Event()
    body = {"prompt": ["a", "b"], "max_tokens": 50, "ignore_eos": True, "stream": stream}
    client = send_request(server.port, body)
    until(lambda: engine.num_requests == 2)
    if phase == "decoding" and stream:
        assert client.recv(100)
    time.sleep(0.1)
    client.close()
    assert until(lambda: engine.num_requests == 0) < 0.1
    assert engine.num_aborted == 2


def test_disconnect_in_the_body_is_no_fault(live_server, scripted, until, caplog):
    server = live_server(scripted())
    client = socket.create_connection(("127.0.0.1", server.port))
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    client.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
    time.sleep(0.1)
    client.close()
    time.sleep(0.2)
    assert not caplog.records


def test_events_come_as_they_are_made(live_server, scripted):
    server = live_server(scripted(delay_s=0.1))
    began = time.monotonic()
    body = {"prompt": "a", "stream": True}
    with contextlib.closing(send_request(server.port, body)) as client:
        reader = client.makefile("rb")
        times = []
        for line in reader:
            if line.startswith(b"data: "):
                times.append(time.monotonic() - began)
            if line == b"data: [DONE]\n":
                break
    assert times[0] < 0.3 and times[-1] - times[0] > 0.3


def test_events_pass_by_the_middleware(live_server, scripted, monkeypatch):
    """It looks at headers only, and to be handed on by all of it costs more than the event."""
    seen = []
    original = RequestIdEcho.__call__

    async def watched(self, scope, receive, send):
        async def watching(message):
            seen.append(message["type"])
            await send(message)

        await original(self, scope, receive, watching)

    monkeypatch.setattr(RequestIdEcho, "__call__", watched)
    url = f"{live_server(scripted()).url}/v1/completions"
    body = {"prompt": "a", "stream": True}
    response = httpx.post(url, json=body, headers={"X-Request-Id": "mine"})
    assert response.headers["x-request-id"] == "mine"
    assert response.text.endswith("data: [DONE]\n\n")
    assert seen == ["http.response.start"]


def test_openai_client(live_server, scripted):
    server = live_server(scripted())
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        assert client.models.list().data[0].id == "tiny"
        assert client.models.retrieve("tiny").id == "tiny"
        messages = [{"role": "user", "content": "hi"}]
        answer = client.chat.completions.create(model="tiny", messages=messages)
        assert answer.choices[0].message.content == "Hello!"
        assert answer.usage.completion_tokens == 7
        stream = client.chat.completions.create(
            model="tiny", messages=messages, stream=True, n=2, temperature=0.5,
            stream_options={"include_usage": True},
        )  # fmt: skip
        chunks = list(stream)
        for index in range(2):
            parts = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
            assert "".join(part.delta.content or "" for part in parts) == "Hello!"
            assert parts[-1].finish_reason == "stop"
        assert chunks[-1].usage.completion_tokens == 14
        completion = client.completions.create(model="tiny", prompt="a", logprobs=1, max_tokens=2)
        assert completion.choices[0].text == "He"
        assert completion.choices[0].logprobs.tokens == ["H", "e"]
        text = "".join(
            chunk.choices[0].text
            for chunk in client.completions.create(model="tiny", prompt="a", stream=True)
        )
        assert text == "Hello!"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="nope", prompt="a")
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="tiny", prompt="a", max_tokens=0)
        assert refused.value.param == "max_tokens"


def test_bind_socket():
    with bind_socket(ServerOptions(port=0)) as first:
        host, port = first.getsockname()
        assert host == "127.0.0.1" and url_of(first) == f"http://127.0.0.1:{port}"
        with pytest.raises(ConfigurationError, match=rf"port {port}.*in use.*--port"):
            bind_socket(ServerOptions(port=port))
    with pytest.raises(ConfigurationError, match=r"no\.such\.host"):
        bind_socket(ServerOptions("no.such.host.invalid", 0))
    with pytest.raises(ConfigurationError, match="65536"):
        bind_socket(ServerOptions(port=65536))
    with pytest.raises(ConfigurationError, match="empty"):
        bind_socket(ServerOptions(port=0, api_keys=("",)))


@pytest.mark.parametrize(
    ("host", "keys", "bound", "warns"),
    [
        (None, (), "127.0.0.1", False),
        (None, ("k",), "0.0.0.0", False),
        ("0.0.0.0", (), "0.0.0.0", True),
        ("127.0.0.1", ("k",), "127.0.0.1", False),
    ],
)
def test_default_bind(caplog, host, keys, bound, warns):
    """S2, PP59: loopback without a key; another address without one is a warning."""
    with bind_socket(ServerOptions(host, 0, keys)) as listener:
        assert listener.getsockname()[0] == bound
    assert ("without an API key" in caplog.text) == warns


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    """A certificate for 127.0.0.1 that has signed itself."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
            "-nodes", "-keyout", "key.pem", "-out", "cert.pem", "-days", "2", "-subj", "/CN=x",
            "-addext", "subjectAltName=IP:127.0.0.1",
        ],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip
    return Tls(str(folder / "key.pem"), str(folder / "cert.pem"))


def test_https(live_server, scripted, tls):
    engine = scripted()
    engine.options = ServerOptions(tls=tls)
    with bind_socket(ServerOptions(port=0, tls=tls)) as listener:
        assert url_of(listener, tls).startswith("https://127.0.0.1:")
    server = live_server(engine)
    trusting = ssl.create_default_context(cafile=tls.certfile)
    with httpx.Client(base_url=f"https://127.0.0.1:{server.port}", verify=trusting) as client:
        answer = client.post("/v1/completions", json={"prompt": "a", "stream": True})
        assert answer.status_code == 200 and answer.text.endswith("[DONE]\n\n")
        assert client.get("/health", headers={f"X{k}": "y" for k in range(300)}).status_code == 431
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        assert not plain.recv(100).startswith(b"HTTP")


def test_unix_socket(live_server, scripted, tmp_path):
    options = ServerOptions(uds=str(tmp_path / "s"))
    with listening(options) as listener:
        live_server(scripted(), listener)
        transport = httpx.HTTPTransport(uds=options.uds)
        with httpx.Client(transport=transport, base_url="http://x") as client:
            assert client.get("/health").status_code == 200
            answer = client.post("/v1/completions", json={"prompt": "a", "stream": True})
            assert answer.text.endswith("[DONE]\n\n")
