"""What all routes share: the engine, whether the server is going down, metrics."""

from headrace.configs.errors import EngineDeadError, EngineNotReadyError
from headrace.frontend.async_engine import EngineState
from headrace.frontend.http.engine import ServingEngine
from headrace.frontend.http.listener import ServerOptions
from headrace.frontend.http.load import ServerLoad
from headrace.frontend.http.metrics import ServerMetrics
from headrace.frontend.http.queue_gate import QueueGate
from headrace.frontend.http.request_log import RequestLog
from headrace.frontend.http.shutdown import Shutdown, going_down
from headrace.frontend.http.work_pool import WorkPool


class ServerState:
    """State of one API-server process."""

    def __init__(self, engine: ServingEngine, options: ServerOptions | None = None) -> None:
        self.engine = engine
        self.options = options or ServerOptions()
        self.shutdown = Shutdown()
        self.pool = WorkPool()
        self.metrics = ServerMetrics(engine)
        self.load = ServerLoad()
        self.queue = QueueGate(engine, self.metrics)
        self.request_log = RequestLog(self.options)

    @property
    def status(self) -> EngineState:
        return "draining" if self.shutdown.begun.is_set() else self.engine.state

    def check_ready(self) -> None:
        """Raises EngineNotReadyError or EngineDeadError unless new requests are taken."""
        status = self.status
        if status == "starting":
            raise EngineNotReadyError("the model is still loading; try again in a moment")
        if status == "draining":
            raise going_down()
        if status == "dead":
            raise EngineDeadError("the engine has ended; try again on another server")

    def check_up(self) -> None:
        """Raises EngineNotReadyError while all engine cores are being restarted."""
        if not self.engine.is_up:
            raise EngineNotReadyError("the engine core is being restarted; try again in a moment")
