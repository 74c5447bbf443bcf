"""Front-end options of `serve`: from the command line to `ServerOptions`; sockets; refusals."""

import argparse
import os
import socket
import ssl

import pytest

from headrace.configs.errors import ConfigurationError
from headrace.configs.options import add_options
from headrace.frontend.cli.frontend_options import FrontendOptions
from headrace.frontend.http.listener import (
    CrossOrigin,
    ServerOptions,
    Tls,
    bind_socket,
    listening,
    url_of,
)


def options(*words, environment_key="", logs_requests=False):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_options(parser, FrontendOptions)
    parsed = FrontendOptions.from_cli_args(parser.parse_args(words))
    return parsed.server_options(environment_key, logs_requests=logs_requests)


def test_defaults():
    assert options() == ServerOptions()


def test_every_option_reaches_the_server(tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    made = options(
        "--host", "::1", "--port", "0", "--root-path", "/llm/", "--api-key", "a", "b",
        "--allowed-origins", '["https://a.example", "https://b.example"]',
        "--allowed-methods", '["GET"]', "--allowed-headers", "X-A", "--allow-credentials",
        "--chat-template", str(template), "--chat-template-content-format", "openai",
        "--default-chat-template-kwargs", '{"enable_thinking": false}', "--response-role", "bot",
        "--trust-request-chat-template", "--enable-prompt-tokens-details",
        "--enable-force-include-usage", "--return-tokens-as-token-ids",
        "--sse-keep-alive-interval", "2.5", "--enable-server-load-tracking", "--max-log-len", "9",
        "--h11-max-header-count", "10", "--h11-max-incomplete-event-size", "4K", "--strict",
        "--access-log", "--drain-timeout", "7.5", logs_requests=True,
    )  # fmt: skip
    assert (made.host, made.port, made.root_path) == ("::1", 0, "/llm")
    assert made.api_keys == ("a", "b")
    origins = ("https://a.example", "https://b.example")
    assert made.cross_origin == CrossOrigin(origins, ("GET",), ("X-A",), True)
    assert made.chat_template == "{{ messages }}"
    assert made.chat_template_content_format == "openai"
    assert made.default_chat_template_kwargs == {"enable_thinking": False}
    assert made.response_role == "bot" and made.trust_request_chat_template
    assert made.enable_prompt_tokens_details and made.enable_force_include_usage
    assert made.return_tokens_as_token_ids and made.sse_keep_alive_interval == 2.5
    assert made.enable_server_load_tracking and made.max_log_len == 9
    assert (made.limits.max_header_count, made.limits.max_header_bytes) == (10, 4096)
    assert made.strict and made.access_log and made.enable_log_requests
    assert made.shutdown_timeout == options("--shutdown-timeout", "7.5").shutdown_timeout == 7.5


def test_keys():
    assert options(environment_key="e").api_keys == ("e",)
    made = options("--api-key", "secret", environment_key="e")
    assert made.api_keys == ("secret",) and "secret" not in repr(made)


def test_a_template_may_be_given_as_itself():
    assert options("--chat-template", "{{ messages[0].content }}").chat_template is not None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--chat-template", "no/such/file.jinja"], "neither a file nor a template"),
        (["--chat-template", "{% for"], "--chat-template: the chat template does not compile"),
        (["--root-path", "llm"], "--root-path"),
        (["--ssl-keyfile", "k"], "both --ssl-certfile and --ssl-keyfile"),
        (["--ssl-ca-certs", "c"], "need --ssl-certfile"),
        (["--ssl-keyfile", "k", "--ssl-certfile", "c", "--ssl-cert-reqs", "3"], "0, 1 or 2"),
        (["--allow-credentials", "--allowed-origins", "*"], "name the origins"),
        (["--sse-keep-alive-interval", "-1"], "sse_keep_alive_interval"),
        (["--h11-max-header-count", "0"], "h11_max_header_count"),
        (["--shutdown-timeout", "-1"], "shutdown_timeout"),
        (["--access-log", "--disable-uvicorn-access-log"], "contradict"),
    ],
)
def test_what_cannot_work_is_refused(words, message):
    with pytest.raises(ConfigurationError, match=message):
        options(*words)


@pytest.mark.parametrize(
    "words",
    [
        ["--port", "x"], ["--default-chat-template-kwargs", "[1]"], ["--allowed-origins", "[1]"],
        ["--chat-template-content-format", "xml"], ["--log-level", "loud"],
        ["--allowed-origins", "[a"],
    ],
)  # fmt: skip
def test_what_is_no_value_is_refused(words, capsys):
    with pytest.raises(SystemExit):
        options(*words)
    assert words[0] in capsys.readouterr().err


def test_strict_needs_a_key_beyond_this_machine():
    """PP59."""
    with pytest.raises(ConfigurationError, match="without an API key"):
        bind_socket(ServerOptions("0.0.0.0", 0, strict=True))
    for fine in (
        ServerOptions(None, 0, strict=True),
        ServerOptions("0.0.0.0", 0, ("k",), strict=True),
    ):
        bind_socket(fine).close()


def test_unix_socket(tmp_path):
    path = str(tmp_path / "s")
    with listening(ServerOptions(uds=path)) as listener:
        assert url_of(listener) == f"unix:{path}"
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
        with pytest.raises(ConfigurationError, match="in use"):
            bind_socket(ServerOptions(uds=path))
    assert not os.path.exists(path)
    bind_socket(ServerOptions(uds=path)).close()  # leaves its file behind
    with listening(ServerOptions(uds=path)):
        pass
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ConfigurationError, match="in use"):
        bind_socket(ServerOptions(uds=str(tmp_path / "file")))
    assert (tmp_path / "file").read_text() == "precious"
    with pytest.raises(ConfigurationError, match="too long"):
        bind_socket(ServerOptions(uds=str(tmp_path / ("x" * 200))))


def test_bad_certificates_are_refused_at_once(tmp_path):
    (tmp_path / "k").write_text("no key")
    for name in ("k", "missing"):
        tls = Tls(str(tmp_path / name), str(tmp_path / name))
        with pytest.raises(ConfigurationError, match="--ssl-certfile"):
            bind_socket(ServerOptions(port=0, tls=tls))
    assert Tls("k", "c").cert_reqs == ssl.CERT_NONE
