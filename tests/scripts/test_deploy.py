"""The load balancers' examples: what they promise, nginx's with stand-ins for the servers."""

import http.server
import re
import shlex
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from headrace.frontend.cli.main import _make_parser
from tests.scripts.nginx_process import DEPLOY, NginxProcess, needs_nginx

HAPROXY = shutil.which("haproxy")
CONFIGS = [path for path in sorted(DEPLOY.iterdir()) if path.suffix != ".md"]


class StandIn(http.server.ThreadingHTTPServer):
    """Answers POSTs as `mode` says: ok; refuse (503); drop (the connection, after the request);
    stream (two events, the second when `go_on` is set).
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.mode = "ok"
        self.go_on = threading.Event()
        self.seen: list[bytes] = []
        self.thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def end(self) -> None:
        self.go_on.set()
        self.shutdown()
        self.server_close()
        self.thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: StandIn

    def do_POST(self) -> None:
        self.server.seen.append(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.mode == "drop":
            self.connection.close()
            return
        body = b'{"error": "full"}' if self.server.mode == "refuse" else b"yes"
        self.send_response(503 if self.server.mode == "refuse" else 200)
        if self.server.mode == "stream":
            self.end_headers()
            self.wfile.write(b"data: 1\n\n")
            self.wfile.flush()
            assert self.server.go_on.wait(10)
            body = b"data: 2\n\n"
        else:
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def servers() -> Iterator[list[StandIn]]:
    servers = [StandIn(), StandIn()]
    yield servers
    for server in servers:
        server.end()


@pytest.fixture
def nginx(servers: list[StandIn], tmp_path: Path) -> Iterator[NginxProcess]:
    nginx = NginxProcess(tmp_path, [server.port for server in servers])
    yield nginx
    nginx.stop()


def post(nginx: NginxProcess, number: int = 0) -> httpx.Response:
    with httpx.Client(trust_env=False, timeout=10) as client:
        return client.post(f"{nginx.url}/v1/completions", content=b"%d" % number)


@needs_nginx
def test_a_refused_post_goes_to_the_other_server(
    nginx: NginxProcess, servers: list[StandIn]
) -> None:
    """And the one that refused is left alone afterwards."""
    servers[0].mode = "refuse"
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: post(nginx, i), range(60)))
    assert {(answer.status_code, answer.content) for answer in answers} == {(200, b"yes")}
    assert Counter(servers[1].seen) == Counter(b"%d" % i for i in range(60))
    assert len(servers[0].seen) <= 30  # of the first moments
    servers[1].mode = "refuse"
    answer = post(nginx)
    assert answer.status_code in (502, 503)  # the client hears of it


@needs_nginx
def test_a_post_that_was_begun_with_is_not_sent_again(
    nginx: NginxProcess, servers: list[StandIn]
) -> None:
    for server in servers:
        server.mode = "drop"
    assert post(nginx, 7).status_code == 502
    assert servers[0].seen + servers[1].seen == [b"7"]


@needs_nginx
def test_a_server_that_is_gone(servers: list[StandIn], tmp_path: Path) -> None:
    gone = StandIn()
    gone.end()
    nginx = NginxProcess(tmp_path, [gone.port, servers[0].port])
    try:
        assert [post(nginx, i).status_code for i in range(10)] == [200] * 10
    finally:
        nginx.stop()
    assert len(servers[0].seen) == 10


@needs_nginx
def test_events_go_on_at_once(nginx: NginxProcess, servers: list[StandIn]) -> None:
    for server in servers:
        server.mode = "stream"
    with (
        httpx.Client(trust_env=False, timeout=10) as client,
        client.stream("POST", f"{nginx.url}/v1/completions", content=b"{}") as answer,
    ):
        parts = answer.iter_raw()
        assert next(parts) == b"data: 1\n\n"  # while the second one does not exist
        for server in servers:
            server.go_on.set()
        assert b"".join(parts) == b"data: 2\n\n"


def test_haproxy_sends_nothing_again_that_was_begun_with() -> None:
    text = (DEPLOY / "haproxy.cfg").read_text()
    settings = [line.split("#")[0].split() for line in text.splitlines()]
    assert ["balance", "leastconn"] in settings
    assert ["retry-on", "conn-failure", "503"] in settings
    assert ["http-check", "send", "meth", "GET", "uri", "/health/ready"] in settings


def test_a_pod_has_time_to_drain() -> None:
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    arguments = container["args"]
    drain = int(arguments[arguments.index("--shutdown-timeout") + 1])
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["spec"]["terminationGracePeriodSeconds"] > drain + pause
    assert container["readinessProbe"]["httpGet"]["path"] == "/health/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health/live"
    assert service["spec"]["selector"] == pod["metadata"]["labels"]


@pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed (apt has it)")
def test_haproxy_takes_its_configuration() -> None:
    assert HAPROXY is not None
    checked = subprocess.run(
        [HAPROXY, "-c", "-f", str(DEPLOY / "haproxy.cfg")], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr
    assert "WARNING" not in checked.stderr


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_commands_are_those_of_the_command_line(path: Path) -> None:
    """In comments, and where containers are started."""
    text = path.read_text()
    commands = re.findall(r"# +(headrace (?:serve|doctor)(?: [^ \n]+)*)", text)
    if path.suffix == ".yaml":
        for document in yaml.safe_load_all(text):
            assert document["kind"] and document["apiVersion"] and document["metadata"]["name"]
            for container in containers(document):
                commands += started_by(container)
    assert commands
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "headrace"
        parser, chosen = _make_parser(words)
        assert chosen is not None
        parser.parse_args(words)  # ends the process if it does not understand something


def containers(value: Any) -> Iterator[dict[str, Any]]:
    """Everything in a YAML document that has a command of its own."""
    if isinstance(value, dict) and "image" in value:
        yield value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        yield from containers(part)


def started_by(container: dict[str, Any]) -> list[str]:
    """Command lines of headrace, with a 1 for what the shell would put in."""
    words = [*container.get("command", ()), *container.get("args", ())]
    if words[:1] == ["headrace"]:
        return [shlex.join(words)]
    script = re.sub(r'"\$\(.*?\)"|"?\$\w+"?', "1", " ".join(words))
    return re.findall(r"headrace (?:serve|doctor)[^;&]*", script)
