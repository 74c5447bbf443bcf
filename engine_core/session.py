"""What blocking and asyncio clients share: requests that outlive the engine core that runs them.

A session follows the supervisor's events. When the engine core is lost, requests wait in the
ledger; when the next one is up, they are replayed. Whoever called sees a pause, or a typed error.
"""

import logging
import time
from collections import deque

import msgspec
import zmq

from headrace.configs.config import EngineConfig, RecoveryConfig
from headrace.configs.errors import (
    EngineChangedError,
    EngineCrashError,
    EngineDeadError,
    EngineNotReadyError,
    HeadraceError,
    error_from_code,
)
from headrace.engine_core import control_messages as control
from headrace.engine_core.connection import Connection
from headrace.engine_core.ledger import LedgerEntry, RequestLedger
from headrace.engine_core.messages import (
    AbortRequest,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineStats,
    FromCore,
    Ready,
    UtilityCall,
)
from headrace.engine_core.supervisor import SupervisorLink
from headrace.workers.protocol import RequestFault, WorkerCall

logger = logging.getLogger(__name__)

# Of EngineStats: what a fresh engine core counts from 0 again.
_COUNTERS = (
    "step", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits", "accounting_errors",
    "num_corrupted", "num_computed_prompt_tokens",
)  # fmt: skip


class Session:
    """A client's requests, its connection while an engine core is up, and why it has ended.

    It waits for nothing: its client does, and hands it what has arrived.
    """

    def __init__(self, link: SupervisorLink) -> None:
        self.link = link
        self.ledger = RequestLedger()
        self.connection: Connection | None = None
        self.ready: Ready | None = None
        self.config: EngineConfig | None = None
        self.error: HeadraceError | None = None  # no engine core will come any more
        self.closed = False
        self.num_connections = 0
        self.weight_version = ""  # of the last outputs
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._recovery = RecoveryConfig()
        self._down: control.EngineDown | None = None
        self._down_since = 0.0  # monotonic seconds
        self._stats = EngineStats()  # the last ones, with those of engine cores before
        self._before = EngineStats()  # of engine cores before

    # -- to the engine core -------------------------------------------------------------------

    def check_alive(self) -> None:
        """Raise the error that ended the engine; while it restarts, it is alive."""
        if self.closed:
            raise EngineDeadError("the engine has been closed; make a new one")
        if self.error is not None:
            raise self.error

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request, or keep it until the engine core is up again."""
        self.check_alive()
        entry = self.ledger.add(request)
        if self.connection is not None:
            entry.was_sent = True
            self.connection.send(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Stop a request, or one choice of it; nothing of it comes any more."""
        self.check_alive()
        self.ledger.abort(request_id, index)
        if self.connection is not None:
            self.connection.send(AbortRequest(request_id, index))

    def send_call(self, call: UtilityCall | WorkerCall) -> None:
        """Calls are not kept: what they do may not bear to be done twice."""
        self.check_alive()
        if self.connection is None:
            raise EngineNotReadyError("the engine core is being restarted; try again in a moment")
        self.connection.send(call)

    def configure(self, config: EngineConfig, hello: control.Hello) -> None:
        """Let the engine core begin to load."""
        self._recovery = config.recovery_config
        self.link.channel.send(control.Configure(hello))

    # -- from it, and from the supervisor -----------------------------------------------------

    def take(self, frames: list[bytes]) -> FromCore | None:
        """What is new in a message of the engine core; None if nothing is."""
        assert self.connection is not None
        try:
            message = self.connection.decode(frames)
        except EngineDeadError as error:  # of another version: nothing it says can be read
            self._end(error)
            return None
        if isinstance(message, EngineCoreOutputs):
            accepted = map(self.ledger.accept, message.outputs)
            message.outputs = [output for output in accepted if output is not None]
            message.stats = self._stats = self._total(message.stats)
            self.weight_version = message.weight_version or self.weight_version
        return message

    def take_event(self, event: control.ToClient | None) -> list[FromCore]:
        """Do what the supervisor's event asks for; what there is to hand out because of it.

        None: the supervisor itself is gone.
        """
        match event:
            case control.Configured():
                self.config = event.config
                self._recovery = event.config.recovery_config
            case control.EngineUp():
                return self._connect(event)
            case control.EngineDown():
                return self._disconnect(event)
            case control.GaveUp():
                self._end(error_from_code(event.fault.code, event.fault.message))
            case None:
                self._end(EngineDeadError("the engine's supervisor has ended"))
        return []

    def close(self) -> None:
        """End the engine core, if it is this program's own, and everything of this session."""
        self.closed = True
        self._drop_connection()
        self.link.close()
        self._context.term()

    def _end(self, error: HeadraceError) -> None:
        self.error = self.error or error
        self._drop_connection()

    def _drop_connection(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def _disconnect(self, event: control.EngineDown) -> list[FromCore]:
        """The engine core is gone: what it had sent is taken first, then requests wait."""
        taken: list[FromCore] = []
        while self.connection is not None and (frames := self.connection.receive()) is not None:
            message = self.take(frames)
            if message is not None:
                taken.append(message)
        self._drop_connection()
        if self._down is None:
            self._down_since = time.monotonic()
        was_modified = event.was_modified or (self._down is not None and self._down.was_modified)
        self._down = msgspec.structs.replace(event, was_modified=was_modified)
        suspects = self.ledger.suspect(event.suspects)
        self._before = msgspec.structs.replace(self._stats)
        logger.debug(
            "engine core lost (replica %d, epoch %d): %d requests wait for the next one, %d of "
            "them were in its step: %s",
            event.rank, event.epoch, len(self.ledger), len(suspects), event.reason,
        )  # fmt: skip
        outputs: list[EngineCoreOutput] = []
        if event.blamed is not None:
            outputs += self.ledger.fail(
                event.blamed,
                RequestFault(
                    EngineCrashError.code,
                    f"the engine core crashed whenever this request ran, most recently: "
                    f"{event.reason}. It is not run again",
                ),
            )
        return [*taken, self._idle_outputs(outputs)]

    def _connect(self, event: control.EngineUp) -> list[FromCore]:
        """An engine core is up: send it what there is to run."""
        before, self.ready = self.ready, event.ready
        down, self._down = self._down, None
        self._drop_connection()
        self.connection = Connection(
            self._context, event.socket_path, event.epoch, self.link.client_id
        )
        self.num_connections += 1
        outputs: list[EngineCoreOutput] = []
        if down is not None and before is not None:
            for entry in self.ledger.entries():
                fault = self._obstacle(entry, before, event.ready, down)
                if fault is not None:
                    outputs += self.ledger.fail(entry.request.request_id, fault)
        self.weight_version = event.ready.weight_version
        num_replayed = sum(entry.was_sent for entry in self.ledger.entries())
        for request in self.ledger.replays(event.rank):
            self.connection.send(request)
        if down is None:
            return []
        pause = time.monotonic() - self._down_since
        self._before.num_restarts += 1
        self._before.num_replayed_requests += num_replayed
        self._before.recovery_s += pause
        logger.info(
            "engine core recovered (replica %d, epoch %d): pause of %.2f s, %d requests replayed, "
            "%d sent for the first time, %d failed",
            event.rank, event.epoch, pause, num_replayed, len(self.ledger) - num_replayed,
            len({output.request_id for output in outputs}),
        )  # fmt: skip
        return [self._idle_outputs(outputs)]

    def _obstacle(
        self, entry: LedgerEntry, before: Ready, after: Ready, down: control.EngineDown
    ) -> RequestFault | None:
        """Why a request cannot go on where it was: what would follow might be another's text."""
        if not entry.was_sent:
            return None
        if down.was_modified and not self._recovery.allow_replay_after_rpc:
            reason = (
                "a call through collective_rpc may have changed the worker before, which the new "
                "one knows nothing of (--allow-replay-after-rpc goes on all the same)"
            )
        elif not entry.has_output:
            return None
        elif self.weight_version != after.weight_version:
            reason = f"weights {self.weight_version} became {after.weight_version}"
        elif before.contract_id != after.contract_id:
            reason = f"numerics {before.contract_id} became {after.contract_id}"
        else:
            return None
        return RequestFault(
            EngineChangedError.code,
            f"the engine core was lost, and the one that came back is not the same: {reason}. "
            "Send the request again",
        )

    def _idle_outputs(self, outputs: list[EngineCoreOutput]) -> EngineCoreOutputs:
        """Outputs of our own making, and the statistics of an engine core that runs nothing."""
        self._stats = msgspec.structs.replace(
            self._total(EngineStats()),
            num_waiting=sum(len(entry.open) for entry in self.ledger.entries()),
            num_free_blocks=self._stats.num_blocks,
            num_blocks=self._stats.num_blocks,
        )
        return EngineCoreOutputs(outputs, self._stats, time.time(), self.weight_version)

    def _total(self, stats: EngineStats) -> EngineStats:
        """Counters since the start of this client; changes `stats`."""
        before = self._before
        if before.num_restarts or self._down is not None:
            for name in _COUNTERS:
                setattr(stats, name, getattr(stats, name) + getattr(before, name))
        stats.num_restarts = before.num_restarts
        stats.num_replayed_requests = before.num_replayed_requests
        stats.recovery_s = before.recovery_s
        return stats


def events_of(link: SupervisorLink) -> deque[control.ToClient | None]:
    """What the supervisor has said since the last time; a None at the end: it is gone."""
    events: deque[control.ToClient | None] = deque()
    while link.channel.has_news():
        events.append(link.channel.receive())
        if events[-1] is None:
            break
    return events
