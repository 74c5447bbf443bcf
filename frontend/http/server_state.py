"""What all routes share: the engine, whether the server is going down, metrics."""

import asyncio

from headrace.configs.errors import EngineDeadError, EngineNotReadyError
from headrace.frontend.async_engine import EngineState
from headrace.frontend.http.engine import ServingEngine
from headrace.frontend.http.listener import ServerOptions
from headrace.frontend.http.load import ServerLoad
from headrace.frontend.http.metrics import ServerMetrics
from headrace.frontend.http.queue_gate import QueueGate
from headrace.frontend.http.request_log import RequestLog


class ServerState:
    """State of one API-server process. `stopping` is set once, when the server goes down."""

    def __init__(self, engine: ServingEngine, options: ServerOptions | None = None) -> None:
        self.engine = engine
        self.options = options or ServerOptions()
        self.stopping = asyncio.Event()
        self.metrics = ServerMetrics(engine)
        self.load = ServerLoad()
        self.queue = QueueGate(engine, self.metrics)
        self.request_log = RequestLog(self.options)

    @property
    def status(self) -> EngineState:
        return "draining" if self.stopping.is_set() else self.engine.state

    def ready_engine(self) -> ServingEngine:
        """The engine, if it takes requests; else EngineNotReadyError or EngineDeadError."""
        self.check_ready()
        return self.engine

    def check_ready(self) -> None:
        status = self.status
        if status == "starting":
            raise EngineNotReadyError("the model is still loading; try again in a moment")
        if status == "draining":
            raise EngineNotReadyError("the server is shutting down; try again on another one")
        if status == "dead":
            raise EngineDeadError("the engine has ended; try again on another server")
