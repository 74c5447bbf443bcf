"""Messages between an executor and the agents that run its workers on other machines."""

import msgspec

from headrace.configs.config import EngineConfig
from headrace.workers.protocol import WorkerSetup


class StartWorkers(msgspec.Struct, tag="start", array_like=True):
    """Start these workers, after the end of those that run."""

    config: EngineConfig
    setups: list[WorkerSetup]
    allows_callables: bool


class ToWorkers(msgspec.Struct, tag="to", array_like=True):
    """Hand this on to every worker of the machine."""

    message: bytes


class NodeExit(msgspec.Struct, tag="exit", array_like=True):
    """The engine has ended; `reason`, if not "", says what is wrong with this machine."""

    reason: str = ""


class NodeHello(msgspec.Struct, tag="node", array_like=True):
    """An agent is there. `address` is that of its machine."""

    node_rank: int
    nnodes: int
    version: str
    address: str


class FromRank(msgspec.Struct, tag="from", array_like=True):
    """What a worker says."""

    rank: int
    message: bytes


class WorkerGone(msgspec.Struct, tag="gone", array_like=True):
    """A worker has ended."""

    rank: int
    description: str
    exit_code: int | None


ToNode = StartWorkers | ToWorkers | NodeExit
FromNode = NodeHello | FromRank | WorkerGone

encode = msgspec.msgpack.Encoder().encode
decode_to_node = msgspec.msgpack.Decoder(ToNode).decode
decode_from_node = msgspec.msgpack.Decoder(FromNode).decode
