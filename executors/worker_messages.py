"""Messages between an executor and a worker in another process: msgpack, one union each way."""

import msgspec

from headrace.configs.config import EngineConfig
from headrace.workers.protocol import (
    ModelRunnerOutput,
    RequestFault,
    SchedulerOutput,
    WorkerCall,
    WorkerInfo,
    WorkerResult,
    WorkerSetup,
)


class WorkerHello(msgspec.Struct, tag="hello", array_like=True):
    """First message: what to load, as which worker, and where the program was started."""

    config: EngineConfig
    setup: WorkerSetup
    sys_path: list[str]
    cwd: str
    allows_callables: bool


class RunStep(msgspec.Struct, tag="step", array_like=True):
    """Run one step. The worker that samples answers, and any that fails."""

    step: SchedulerOutput


class WorkerExit(msgspec.Struct, tag="exit", array_like=True):
    """Leave the groups and exit with code 0."""


class WorkerProgress(msgspec.Struct, tag="progress", array_like=True):
    """The worker has entered a start-up phase."""

    phase: str


class WorkerReady(msgspec.Struct, tag="ready", array_like=True):
    """The worker takes steps."""

    info: WorkerInfo


class StepDone(msgspec.Struct, tag="done", array_like=True):
    """What a step gave, from the worker that samples."""

    output: ModelRunnerOutput


class CallDone(msgspec.Struct, tag="called", array_like=True):
    """What a `WorkerCall` gave on this worker."""

    result: WorkerResult


class WorkerFailed(msgspec.Struct, tag="failed", array_like=True):
    """The start, or a step, raised."""

    fault: RequestFault


ToWorker = WorkerHello | RunStep | WorkerCall | WorkerExit
FromWorker = WorkerProgress | WorkerReady | StepDone | CallDone | WorkerFailed

encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
