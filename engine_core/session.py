"""What blocking and asyncio clients share: requests that outlive the engine core that runs them.

A session follows the supervisor's events. Each request goes to one of the replicas that are up.
When its engine core is lost, another replica that would go on with the same text takes it at once;
where there is none it waits in the ledger for the next engine core. Whoever called sees a pause, or
a typed error.
"""

import logging
import time
import zlib
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
    RoutingReason,
    UtilityCall,
)
from headrace.engine_core.replica_view import ReplicaView
from headrace.engine_core.router import Router
from headrace.engine_core.supervisor import SupervisorLink
from headrace.workers.protocol import RequestFault, WorkerCall

logger = logging.getLogger(__name__)

_ENDED_BY_ITSELF = ("stop", "length")


class Session:
    """A client's requests, its connections to engine cores that are up, and why it has ended.

    It waits for nothing: its client does, and hands it what has arrived.
    """

    def __init__(self, link: SupervisorLink) -> None:
        self.link = link
        self.ledger = RequestLedger()
        self.router = Router(zlib.crc32(link.client_id.encode()), has_others=link.has_others)
        self.replicas: dict[int, ReplicaView] = {}  # that were heard of, by rank
        self.config: EngineConfig | None = None
        self.error: HeadraceError | None = None  # no engine core will come any more
        self.closed = False
        self.num_losses = 0  # of engine cores
        self.weight_version = ""  # of the last outputs
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._recovery = RecoveryConfig()

    # -- replicas -----------------------------------------------------------------------------

    @property
    def ranks(self) -> range:
        """Of the replicas that there are, or will be."""
        return range(1) if self.config is None else self.config.parallel_config.ranks

    @property
    def connections(self) -> dict[int, Connection]:
        """Those of the replicas that are up, by rank."""
        return {
            rank: replica.connection
            for rank, replica in sorted(self.replicas.items())
            if replica.connection is not None
        }

    @property
    def is_up(self) -> bool:
        """Whether requests run at this moment."""
        return any(replica.connection is not None for replica in self.replicas.values())

    @property
    def is_whole(self) -> bool:
        """Whether every replica is up."""
        return all(
            rank in self.replicas and self.replicas[rank].connection is not None
            for rank in self.ranks
        )

    @property
    def is_ready(self) -> bool:
        """Whether every replica has been up, and one is."""
        return self.is_up and all(
            rank in self.replicas
            and (self.replicas[rank].connection or self.replicas[rank].down) is not None
            for rank in self.ranks
        )

    @property
    def ready(self) -> Ready | None:
        """Facts of the first replica that has been up, with what all of them can hold."""
        known = [view.ready for _, view in sorted(self.replicas.items()) if view.ready is not None]
        if len(known) < 2:
            return known[0] if known else None
        least = min(ready.max_request_tokens for ready in known)
        return msgspec.structs.replace(known[0], max_request_tokens=least)

    # -- to the engine cores ------------------------------------------------------------------

    def check_alive(self) -> None:
        """Raise the error that ended the engine; while it restarts, it is alive."""
        if self.closed:
            raise EngineDeadError("the engine has been closed; make a new one")
        if self.error is not None:
            raise self.error

    def add_request(self, request: EngineCoreRequest, rank: int | None = None) -> None:
        """Send a request, or keep it until an engine core is up again.

        `rank`: of the replica that is to run it, whatever others do; one of `ranks`.
        """
        self.check_alive()
        entry = self.ledger.add(request, rank)
        self._send(entry, "pinned" if entry.is_pinned else None)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Stop a request, or one choice of it; nothing of it comes any more."""
        self.check_alive()
        entry = self.ledger.get(request_id)
        if entry is None:
            return
        self.ledger.abort(request_id, index)
        if request_id not in self.ledger:
            self.router.forget(request_id)
        if not entry.is_waiting and entry.rank is not None:
            connection = self.replicas[entry.rank].connection
            if connection is not None:
                connection.send(AbortRequest(request_id, index))

    def send_call(self, call: UtilityCall | WorkerCall) -> None:
        """Send a call to every replica.

        Calls are not kept: what they do may not bear to be done twice.
        """
        self.check_alive()
        if not self.is_whole:
            raise EngineNotReadyError("an engine core is being restarted; try again in a moment")
        if isinstance(call, UtilityCall) and call.method == "reset_prefix_cache":
            self.router.forget_prefixes()
        for connection in self.connections.values():
            connection.send(call)

    def configure(self, config: EngineConfig, hello: control.Hello) -> None:
        """Let the engine cores begin to load."""
        self.config = config
        self._recovery = config.recovery_config
        self.link.channel.send(control.Configure(hello))

    # -- from them, and from the supervisor ---------------------------------------------------

    def take(self, rank: int, frames: list[bytes]) -> FromCore | None:
        """What is new in a message of a replica's engine core; None if nothing is."""
        replica = self.replicas[rank]
        assert replica.connection is not None
        try:
            message = replica.connection.decode(frames)
        except EngineDeadError as error:  # of another version: nothing it says can be read
            self._end(error)
            return None
        if message is None:
            return None
        message.rank = rank
        if isinstance(message, EngineCoreOutputs):
            self.router.report(rank, message.stats.num_outstanding_tokens, message.num_received)
            accepted = map(self._accept, message.outputs)
            message.outputs = [output for output in accepted if output is not None]
            message.stats = self._with_decisions(replica, message)
            self.weight_version = message.weight_version or self.weight_version
        return message

    def _accept(self, output: EngineCoreOutput) -> EngineCoreOutput | None:
        entry = self.ledger.get(output.request_id)
        accepted = self.ledger.accept(output)
        if entry is not None and accepted is not None:
            limit = entry.request.sampling_params.max_tokens
            if accepted.finish_reason in _ENDED_BY_ITSELF and limit is not None:
                self.router.lengths.add(limit, accepted.start + len(accepted.new_token_ids))
        return accepted

    def _with_decisions(self, replica: ReplicaView, message: EngineCoreOutputs) -> EngineStats:
        stats = replica.total(message.stats)
        stats.routed = self.router.decisions_of(replica.rank)
        return stats

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
        self._drop_connections()
        self.link.close()
        self._context.term()

    def _end(self, error: HeadraceError) -> None:
        self.error = self.error or error
        self._drop_connections()

    def _drop_connections(self) -> None:
        for rank, replica in self.replicas.items():
            replica.disconnect()
            self.router.remove_replica(rank)

    # -- requests and replicas ----------------------------------------------------------------

    def _send(self, entry: LedgerEntry, reason: RoutingReason | None = None) -> bool:
        """Send a request that waits to a replica that may run it; False if none is up."""
        ranks = self._able(entry)
        if not ranks:
            return False
        message = self.ledger.message(entry)
        rank = self.router.place(message, ranks, reason)
        connection = self.replicas[rank].connection
        assert connection is not None
        self.ledger.sent(entry, rank)
        connection.send(message)
        return True

    def _able(self, entry: LedgerEntry) -> list[int]:
        """Replicas that are up and would go on with the text of a request that waits."""
        up = self.router.ranks
        if entry.is_pinned:
            return [rank for rank in up if rank == entry.rank]
        if not entry.was_sent or entry.rank is None:
            return up
        lost = self.replicas[entry.rank]
        if lost.down is None or lost.ready is None:  # it is there: `_connect` has looked at it
            return [rank for rank in up if rank == entry.rank]
        return [
            rank
            for rank in up
            if (ready := self.replicas[rank].ready) is not None
            and self._obstacle(entry, lost.ready, ready, lost.down) is None
        ]

    def _disconnect(self, event: control.EngineDown) -> list[FromCore]:
        """An engine core is gone: what it had sent is taken first, then others take its requests.

        Those that no other may go on with wait for the next one.
        """
        replica = self.replicas.setdefault(event.rank, ReplicaView(event.rank))
        taken: list[FromCore] = []
        while (connection := replica.connection) is not None:
            frames = connection.receive()
            if frames is None:
                break
            message = self.take(event.rank, frames)
            if message is not None:
                taken.append(message)
        self.num_losses += replica.connection is not None
        replica.lose(event)
        self.router.remove_replica(event.rank)
        suspects = self.ledger.suspect(event.suspects)
        self.ledger.lose(event.rank)
        outputs: list[EngineCoreOutput] = []
        if event.blamed is not None:
            outputs += self.ledger.fail(event.blamed, _crash_fault(event))
        num_moved = num_waiting = 0
        for entry in self.ledger.waiting():
            was_sent = entry.was_sent
            if self._send(entry, "moved"):
                num_moved += was_sent
            else:
                num_waiting += 1
        replica.count_replayed(num_moved)
        logger.log(
            logging.INFO if num_moved else logging.DEBUG,
            "engine core lost (replica %d, epoch %d): %d requests moved to other replicas, %d wait "
            "for the next one; %d were in its step: %s",
            event.rank, event.epoch, num_moved, num_waiting, len(suspects), event.reason,
        )  # fmt: skip
        return [*taken, self._own_outputs(replica, outputs)]

    def _connect(self, event: control.EngineUp) -> list[FromCore]:
        """An engine core is up: send it what waits for it."""
        replica = self.replicas.setdefault(event.rank, ReplicaView(event.rank))
        before, down = replica.ready, replica.down
        if replica.connection is not None:  # the one before is lost, whoever was told of it
            self.num_losses += 1
            self.ledger.lose(event.rank)
        self.router.add_replica(event.rank, event.ready.block_size, event.ready.num_blocks)
        replica.connect(self._context, event, self.link.client_id, self.link.channel.send)
        outputs: list[EngineCoreOutput] = []
        num_replayed = num_new = 0
        for entry in self.ledger.waiting():
            if entry.was_sent and entry.rank == event.rank and down and before:
                fault = self._obstacle(entry, before, event.ready, down)
                if fault is not None:
                    outputs += self.ledger.fail(entry.request.request_id, fault)
                    continue
        self.weight_version = event.ready.weight_version
        replica.down = None
        for entry in self.ledger.waiting():
            was_sent, reason = entry.was_sent, _reason_to_return(entry, event.rank)
            if self._send(entry, reason):
                num_replayed += was_sent
                num_new += not was_sent
        if down is None:
            return []
        pause = replica.recovered(num_replayed)
        logger.info(
            "engine core recovered (replica %d, epoch %d): pause of %.2f s, %d requests replayed, "
            "%d sent for the first time, %d failed",
            event.rank, event.epoch, pause, num_replayed, num_new,
            len({output.request_id for output in outputs}),
        )  # fmt: skip
        return [self._own_outputs(replica, outputs)]

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

    def _own_outputs(
        self, replica: ReplicaView, outputs: list[EngineCoreOutput]
    ) -> EngineCoreOutputs:
        """Outputs of our own making, and the statistics of an engine core that runs nothing."""
        num_waiting = sum(
            len(entry.open)
            for entry in self.ledger.entries()
            if entry.rank == replica.rank or (entry.rank is None and entry.is_waiting)
        )
        message = EngineCoreOutputs(
            outputs,
            replica.idle(num_waiting),
            time.time(),
            rank=replica.rank,
            weight_version=self.weight_version,
        )
        message.stats.routed = self.router.decisions_of(replica.rank)
        return message


def _reason_to_return(entry: LedgerEntry, rank: int) -> RoutingReason | None:
    """Why a request that waits is sent when the replica `rank` has come back."""
    if not entry.was_sent:
        return "pinned" if entry.is_pinned else None
    return "returned" if entry.rank == rank else "moved"


def _crash_fault(event: control.EngineDown) -> RequestFault:
    return RequestFault(
        EngineCrashError.code,
        f"the engine core crashed whenever this request ran, most recently: {event.reason}. It is "
        "not run again",
    )


def events_of(link: SupervisorLink) -> deque[control.ToClient | None]:
    """What the supervisor has said since the last time; a None at the end: it is gone."""
    events: deque[control.ToClient | None] = deque()
    while link.channel.has_news():
        events.append(link.channel.receive())
        if events[-1] is None:
            break
    return events
