"""ZMQ between an executor and workers that do not hang on a socket pair: on this machine, or not.

Every socket uses CURVE, and both ends have the same key pair, the deployment's: who does not have
it can neither talk nor listen.
"""

import contextlib
import math
import os
import secrets
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from headrace.configs.errors import ConfigurationError
from headrace.executors.worker_messages import (
    FromWorker,
    ToWorker,
    decode_to_worker,
    encode,
)

# A machine that is lost says nothing; TCP alone would wait for it for minutes.
HEARTBEAT_INTERVAL_MS = 1_000
HEARTBEAT_TIMEOUT_MS = 10_000
_LINGER_MS = 500
# After some connection has ended: whose it was shows a moment later, for whoever looks.
RECHECK_S = 2.0
RECHECK_INTERVAL_S = 0.05


@dataclass(frozen=True)
class DeploymentKey:
    """A CURVE key pair (Z85), the same on every machine of a deployment."""

    public: str
    secret: str = field(repr=False)

    @classmethod
    def generate(cls) -> "DeploymentKey":
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    @classmethod
    def read(cls, path: str) -> "DeploymentKey":
        """Of a file that `write` has made. Raises ConfigurationError."""
        try:
            if stat.S_IMODE(os.stat(path).st_mode) & 0o077:
                raise ConfigurationError(
                    f"others can read the key file {path}; run: chmod 600 {path}"
                )
            words = Path(path).read_text().split()
            key = cls(*words)
            derived = zmq.curve_public(key.secret.encode()).decode()
        except (OSError, TypeError, ValueError, zmq.ZMQError) as error:
            raise ConfigurationError(
                f"{path} is no key file: {error}. `headrace doctor --make-key {path}` makes one; "
                "copy it to every machine"
            ) from error
        if derived != key.public:
            raise ConfigurationError(f"{path} is no key file: its two keys are not a pair")
        return key

    def as_pipe(self) -> int:
        """The read end of a pipe with the key in it, for a child process; see `from_pipe`."""
        read_end, write_end = os.pipe()
        with os.fdopen(write_end, "w") as file:  # less than a pipe holds
            file.write(f"{self.public}\n{self.secret}\n")
        return read_end

    @classmethod
    def from_pipe(cls, fd: int) -> "DeploymentKey":
        """Closes it."""
        with os.fdopen(fd) as file:
            return cls(*file.read().split())

    def write(self, path: str) -> None:
        """Into a new file that only its owner can read. Raises ConfigurationError."""
        try:
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except OSError as error:
            raise ConfigurationError(f"the key file cannot be made: {error}") from error
        with os.fdopen(fd, "w") as file:
            file.write(f"{self.public}\n{self.secret}\n")


class _OneKey:
    """For ThreadAuthenticator: who may connect."""

    def __init__(self, key: DeploymentKey) -> None:
        self._public = key.public.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        return secrets.compare_digest(key, self._public)


class WorkerHub:
    """The executor's end: one socket, whatever the number of workers. One thread uses it.

    Any thread may call `wake`.
    """

    def __init__(self, key: DeploymentKey) -> None:
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self._router.setsockopt(option, 0)
        self._authenticator = lock(self._context, self._router, key)
        self._woken, self._waker = os.pipe()
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._woken, zmq.POLLIN)
        self._monitor = self._router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._poller.register(self._monitor, zmq.POLLIN)
        self.on_disconnect: Callable[[], None] = lambda: None  # somebody's connection has ended

    def listen_here(self) -> str:
        """For workers on this machine: no port, no file. The address."""
        address = f"ipc://@headrace-{secrets.token_hex(8)}"
        self._router.bind(address)
        return address

    def listen(self, host: str, port: int = 0) -> str:
        """On that address of this machine only; port 0 takes a free one. The address.

        Raises ConfigurationError.
        """
        return bind(self._router, host, port)

    def send(self, identity: bytes, message: bytes) -> None:
        """Raises ConnectionError if nobody of that name is there."""
        try:
            self._router.send_multipart([identity, message])
        except zmq.ZMQError as error:
            raise ConnectionError(str(error)) from error

    def is_missing(self, identity: bytes) -> bool:
        """Whether nobody of that name is connected. A channel takes no notice of being asked."""
        try:
            self.send(identity, b"")
        except ConnectionError:
            return True
        return False

    def receive(self, deadline: float | None) -> tuple[bytes, bytes] | None:
        """(identity, message), or None.

        None comes after `wake` and `on_disconnect`, and when `deadline` (monotonic) has passed;
        messages come first.
        """
        timeout = None if deadline is None else milliseconds_to(deadline)
        events = dict(self._poller.poll(timeout))
        if self._router in events:
            identity, message = self._router.recv_multipart()
            return identity, message
        if self._woken in events:
            os.read(self._woken, 1)
        if self._monitor in events:
            self._monitor.recv_multipart()
            self.on_disconnect()
        return None

    def wake(self) -> None:
        """Make `receive` return, now or when it is called."""
        with contextlib.suppress(OSError):  # closed
            os.write(self._waker, b"x")

    def close(self) -> None:
        """Send what is queued. Idempotent."""
        if self._router.closed:
            return
        self._router.disable_monitor()
        self._monitor.close(linger=0)
        self._router.close(linger=_LINGER_MS)
        self._authenticator.stop()
        self._context.term()
        os.close(self._woken)
        os.close(self._waker)


class HubChannel:
    """A worker's end: a `WorkerChannel`. ZMQ's own thread reads."""

    def __init__(self, address: str, identity: bytes, key: DeploymentKey) -> None:
        self._context = zmq.Context()
        self._dealer = connect(self._context, address, identity, key)

    def receive(self) -> ToWorker:
        while not (message := self._dealer.recv()):
            pass  # the executor looks whether we are there
        return decode_to_worker(message)

    def send(self, message: FromWorker) -> None:
        self._dealer.send(encode(message))

    def close(self) -> None:
        """Send what is queued."""
        self._dealer.close(linger=_LINGER_MS)
        self._context.term()


def milliseconds_to(deadline: float) -> int:
    """From now to then (monotonic seconds), rounded up; 0 if it has passed."""
    return max(0, math.ceil(1000 * (deadline - time.monotonic())))


def lock(
    context: "zmq.Context[zmq.Socket[bytes]]", server: "zmq.Socket[bytes]", key: DeploymentKey
) -> ThreadAuthenticator:
    """Let only who has the key connect to a socket that is not bound yet.

    Before the context ends, `stop` what is returned.
    """
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(credentials_provider=_OneKey(key))
    server.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
    server.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    server.curve_server = True
    server.curve_publickey = key.public.encode()
    server.curve_secretkey = key.secret.encode()
    return authenticator


def bind(server: "zmq.Socket[bytes]", host: str, port: int = 0) -> str:
    """Listen on that address of this machine only; port 0 takes a free one. The ZMQ address.

    Raises ConfigurationError.
    """
    if ":" in host:
        server.setsockopt(zmq.IPV6, 1)
        host = f"[{host}]"
    try:
        server.bind(f"tcp://{host}:{port or '*'}")
    except zmq.ZMQError as error:
        raise ConfigurationError(f"cannot listen on {host}:{port}: {error}") from error
    return server.getsockopt_string(zmq.LAST_ENDPOINT)


def connect(
    context: "zmq.Context[zmq.Socket[bytes]]", address: str, identity: bytes, key: DeploymentKey
) -> "zmq.Socket[bytes]":
    """A DEALER of that name."""
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.IDENTITY, identity)
    if "[" in address:
        dealer.setsockopt(zmq.IPV6, 1)
    for option in (zmq.SNDHWM, zmq.RCVHWM):
        dealer.setsockopt(option, 0)
    dealer.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
    dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    dealer.curve_serverkey = key.public.encode()
    dealer.curve_publickey = key.public.encode()
    dealer.curve_secretkey = key.secret.encode()
    dealer.connect(address)
    return dealer
