"""The listening socket. It is bound before anything slow begins, so this module imports little."""

import logging
import os
import socket
from dataclasses import dataclass

from headrace.configs.errors import ConfigurationError

logger = logging.getLogger(__name__)

BACKLOG = 2048
LOOPBACK = "127.0.0.1"
ALL_ADDRESSES = "0.0.0.0"


@dataclass(frozen=True)
class ServerOptions:
    """Where to listen and whom to answer. `host` None: loopback unless there are keys."""

    host: str | None = None
    port: int = 8000
    api_keys: tuple[str, ...] = ()

    @property
    def bind_host(self) -> str:
        return self.host or (ALL_ADDRESSES if self.api_keys else LOOPBACK)


def bind_socket(options: ServerOptions) -> socket.socket:
    """A listening socket. Raises ConfigurationError: port in use, not allowed, unknown host."""
    host, port = options.bind_host, options.port
    if not 0 <= port < 65536:
        raise ConfigurationError(f"--port must be in [0, 65535], got {port}")
    if not all(options.api_keys):
        raise ConfigurationError("an API key is empty; give keys that are not, or leave them out")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigurationError(f"--host {host} is not a known address: {error}") from error
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
    if not options.api_keys and not _is_loopback(str(address[0])):
        logger.warning(
            "listening on %s without an API key: everyone who reaches this machine can use the "
            "model; give --api-key, or listen on %s",
            host,
            LOOPBACK,
        )
    return listener


def url_of(listener: socket.socket) -> str:
    """Where a client on this machine finds the server."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
