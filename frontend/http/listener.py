"""The listening socket. It is bound before anything slow begins, so this module imports little."""

import contextlib
import ctypes
import logging
import os
import socket
import ssl
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.configs.errors import ConfigurationError
from headrace.frontend.http.limits import RequestLimits
from headrace.frontend.render_params import ContentFormat

logger = logging.getLogger(__name__)

BACKLOG = 2048
LOOPBACK = "127.0.0.1"
ALL_ADDRESSES = "0.0.0.0"
SO_ATTACH_FILTER = 26  # of asm-generic/socket.h; the module socket does not have it
# Classic BPF: of the packets that reach a listening socket, none that begins a connection.
_NO_SYN = (
    (0x30, 0, 0, 13),  # load the byte with the flags of the TCP header
    (0x45, 0, 1, 0x02),  # is SYN among them?
    (0x06, 0, 0, 0),  # yes: drop
    (0x06, 0, 0, 0xFFFFFFFF),  # no: keep all of it
)


@dataclass(frozen=True)
class Tls:
    """Files of an HTTPS server; `cert_reqs` is one of ssl.CERT_NONE, _OPTIONAL and _REQUIRED."""

    keyfile: str
    certfile: str
    ca_certs: str | None = None
    cert_reqs: int = ssl.CERT_NONE


@dataclass(frozen=True)
class CrossOrigin:
    """Which pages of other origins a browser lets talk to the server; by default none."""

    origins: tuple[str, ...] = ()
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    credentials: bool = False


@dataclass(frozen=True)
class ServerOptions:
    """What the operator chose for the HTTP front end; `headrace serve --help` has the flags.

    `host` None: loopback unless there are keys. `uds`: the path of a Unix socket, instead of host
    and port. `root_path`: the prefix that a proxy strips. `chat_template`: the text, None for the
    model's own.
    """

    host: str | None = None
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_api_keys: tuple[str, ...] = field(default=(), repr=False)  # none: no admin routes
    uds: str | None = None
    root_path: str = ""
    tls: Tls | None = None
    cross_origin: CrossOrigin = field(default_factory=CrossOrigin)
    limits: RequestLimits = field(default_factory=RequestLimits)
    strict: bool = False  # unknown fields and unsafe settings are errors
    response_role: str = "assistant"
    chat_template: str | None = None
    chat_template_content_format: ContentFormat = "auto"
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    trust_request_chat_template: bool = False
    enable_prompt_tokens_details: bool = False
    enable_force_include_usage: bool = False
    return_tokens_as_token_ids: bool = False
    sse_keep_alive_interval: float = 0.0  # seconds between comments on an idle stream; 0: none
    enable_log_requests: bool = False
    max_log_len: int | None = None  # characters or ids of a prompt in the log
    enable_server_load_tracking: bool = False
    access_log: bool = False
    # Seconds for running requests at the end; with the 2 s an engine core has then, under 5 in all.
    shutdown_timeout: float = 2.0

    @property
    def bind_host(self) -> str:
        return self.host or (ALL_ADDRESSES if self.api_keys else LOOPBACK)


@contextlib.contextmanager
def listening(options: ServerOptions) -> Iterator[socket.socket]:
    """`bind_socket` for a while; the file of a Unix socket is removed at the end."""
    with bind_socket(options) as listener:
        try:
            yield listener
        finally:
            if options.uds is not None:
                Path(options.uds).unlink(missing_ok=True)


def bind_socket(options: ServerOptions) -> socket.socket:
    """A listening socket. Raises ConfigurationError: in use, not allowed, unknown host, bad key."""
    if not all((*options.api_keys, *options.admin_api_keys)):
        raise ConfigurationError("an API key is empty; give keys that are not, or leave them out")
    if options.tls is not None:
        _check_tls(options.tls)
    if options.uds is not None:
        return _bind_unix(options.uds)
    return _bind_tcp(options)


def _bind_tcp(options: ServerOptions) -> socket.socket:
    host, port = options.bind_host, options.port
    if not 0 <= port < 65536:
        raise ConfigurationError(f"--port must be in [0, 65535], got {port}")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigurationError(f"--host {host} is not a known address: {error}") from error
    _check_openness(options, host, str(address[0]))
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            f"cannot listen on {host} port {port}: {os.strerror(error.errno or 0)}; end the "
            "program that uses the port, or choose another one with --port (0 finds a free one)"
        ) from error
    return listener


def _check_openness(options: ServerOptions, host: str, address: str) -> None:
    """Everyone may use a server without keys: fine on this machine only."""
    if options.api_keys or address.startswith("127.") or address == "::1":
        return
    text = (
        f"listening on {host} without an API key: everyone who reaches this machine can use the "
        f"model; give --api-key, or listen on {LOOPBACK}"
    )
    if options.strict:
        raise ConfigurationError(f"--strict refuses {text}")
    logger.warning("%s", text)


def _bind_unix(path: str) -> socket.socket:
    """A Unix socket; the file of one that nobody listens on any more is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).is_socket() and _is_stale(path):
            Path(path).unlink()
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise ConfigurationError(f"cannot listen on --uds {path}: {reason}") from error
    return listener


def _is_stale(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
    return False


def _check_tls(tls: Tls) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.certfile, tls.keyfile)
        if tls.ca_certs is not None:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(tls.ca_certs)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"--ssl-certfile {tls.certfile} with --ssl-keyfile {tls.keyfile} cannot be used: "
            f"{error}"
        ) from error


def stop_connections(listener: socket.socket) -> None:
    """Let no connection begin any more, while those that have may still be accepted.

    Closing a listening socket resets every connection that waits to be accepted, and a client
    cannot know whether its request was begun with. An attempt from now on gets no answer; it is
    made again, a second later, and refused if the socket is closed by then. Does nothing for a Unix
    socket, or where the kernel does not let us.
    """
    if listener.family == socket.AF_UNIX:
        return
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in _NO_SYN))
    program = struct.pack("@HP", len(_NO_SYN), ctypes.addressof(code))
    with contextlib.suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def url_of(listener: socket.socket, tls: Tls | None = None) -> str:
    """Where a client on this machine finds the server."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}"
