"""`EngineCore`: scheduler plus executor, one step at a time; knows nothing of sockets."""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from headrace.configs.config import EngineConfig
from headrace.configs.errors import (
    EngineDeadError,
    HeadraceError,
    InvalidRequestError,
    RequestFailedError,
)
from headrace.engine_core.core_state import CoreState
from headrace.engine_core.fence import FenceWriter
from headrace.engine_core.maintenance import Maintenance
from headrace.engine_core.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineStats,
    Ready,
    UtilityCall,
    UtilityResult,
)
from headrace.engine_core.scheduler import Scheduler
from headrace.executors.executor import make_executor
from headrace.executors.worker_calls import decode_results, encode_call, has_failed, only_reads
from headrace.workers.protocol import RequestFault, SchedulerOutput, WorkerCall

logger = logging.getLogger(__name__)

MAX_CONSECUTIVE_FAILURES = 3  # steps that raise, one after the other, before the engine gives up


class EngineCore:
    """Token ids in, token ids out. Construction loads the model; `progress` is told each phase."""

    UTILITIES = ("reset_prefix_cache", "check_integrity", "stats", *Maintenance.METHODS)

    def __init__(
        self,
        config: EngineConfig,
        pid: int,
        progress: Callable[[str], None] = lambda phase: None,
        allows_callables: bool = False,
        on_worker_death: Callable[[], None] = lambda: None,
        fence: int | None = None,
        lifeline: int | None = None,
        state: CoreState | None = None,
        on_change: Callable[[CoreState], None] = lambda state: None,
    ) -> None:
        """`on_worker_death` is called, in any thread, when `check` has something to say.

        `fence`: descriptor of the supervisor's; `lifeline`: one that the workers keep open, too.
        `state`: of the engine core before, which this one is brought to. `on_change` is called with
        what the next one would have to be brought to.
        """
        self._executor = make_executor(config, allows_callables, on_worker_death, lifeline)
        self._fence = None if fence is None else FenceWriter(fence, self._executor.max_in_flight)
        self._submitted: deque[SchedulerOutput] = deque()
        info = self._executor.start(progress)
        self._scheduler = Scheduler(config, info.kv_cache_spec, info.num_blocks)
        self._num_failures = 0
        self._maintenance = Maintenance(
            config, self._scheduler, self._on_workers, self._unwatched, on_change
        )
        if state is not None:
            self._maintenance.restore(state)
        self.ready = Ready(
            num_blocks=info.num_blocks - 1,
            block_size=info.kv_cache_spec.block_size,
            max_request_tokens=self._scheduler.max_request_tokens,
            contract_id=info.contract_id,
            phases=info.phases,
            memory=info.memory,
            num_threads=info.num_threads,
            pid=pid,
            weight_version=self.weight_version,
        )

    @property
    def weight_version(self) -> str:
        """Of the weights that compute now."""
        return self._maintenance.weight_version

    def add_request(self, request: EngineCoreRequest) -> list[EngineCoreOutput]:
        """Queue a request.

        One that is refused gets its error as outputs, and nothing else is touched.
        """
        try:
            self._scheduler.add_request(request)
        except InvalidRequestError as error:
            fault = RequestFault(error.code, str(error))
        except Exception as error:  # the fence: whatever one request does, the others go on
            logger.exception("request %s could not be added", request.request_id)
            fault = RequestFault("request_failed", f"internal error: {type(error).__name__}")
        else:
            return []
        return [
            EngineCoreOutput(
                request.request_id, choice.index, len(choice.output_token_ids), [],
                finish_reason="error", fault=fault,
            )
            for choice in request.choices
        ]  # fmt: skip

    def abort(self, request_id: str, index: int | None) -> list[EngineCoreOutput]:
        """Stop a request or one choice of it; its blocks are free at once."""
        return self._scheduler.abort(request_id, index)

    def has_work(self) -> bool:
        return bool(self._submitted) or self._scheduler.has_work()

    def stats(self) -> EngineStats:
        return self._scheduler.stats()

    def step(self) -> list[EngineCoreOutput]:
        """Hand out as many steps as the workers take at once, and account for the oldest.

        [] when there was nothing to run.
        """
        while len(self._submitted) < self._executor.max_in_flight:
            step = self._scheduler.schedule()
            if step is None:
                break
            self._submitted.append(step)
            if self._fence is not None:
                self._fence.begin(step)
            self._executor.submit(step)
        if not self._submitted:
            return []
        step = self._submitted.popleft()
        outputs = self._account(step)
        if self._fence is not None:
            self._fence.end(step.step)
        return outputs

    def _account(self, step: SchedulerOutput) -> list[EngineCoreOutput]:
        try:
            output = self._executor.collect()
        except EngineDeadError:
            raise
        except Exception as error:
            self._num_failures += 1
            if self._num_failures >= MAX_CONSECUTIVE_FAILURES:
                raise
            logger.exception("step %d failed; failing the requests in it", step.step)
            message = f"the step failed: {type(error).__name__}: {error}"
            return self._scheduler.fail_step(step, RequestFault("request_failed", message))
        self._num_failures = 0
        return self._scheduler.update_from_output(step, output)

    def beat(self) -> None:
        """The loop goes on: tell whoever watches it."""
        if self._fence is not None:
            self._fence.beat()

    def call(self, call: UtilityCall, reply: Callable[[UtilityResult], None]) -> None:
        """Run one of `UTILITIES`, at once or when nothing runs; errors come back in the result."""

        def answer(value: object) -> None:
            if isinstance(value, HeadraceError):
                fault = RequestFault(value.code, str(value))
                reply(UtilityResult(call.call_id, fault=fault))
            else:
                reply(UtilityResult(call.call_id, value))

        if call.method in Maintenance.METHODS:
            self._maintenance.call(call.method, call.kwargs, lambda: not self.has_work(), answer)
        elif call.method in self.UTILITIES:
            try:
                value: Any = getattr(self._scheduler, call.method)()
            except HeadraceError as error:
                value = error
            answer(value)
        else:
            answer(InvalidRequestError(f"there is no utility {call.method!r}"))

    def advance(self) -> None:
        """Do what waits for a moment in which nothing runs, if that is now."""
        if not self.has_work():
            self._maintenance.advance()

    def call_workers(self, call: WorkerCall) -> UtilityResult:
        """Run a `WorkerCall` on every worker; errors come back in the result.

        It may take any time. What it may have changed in the workers is not there after a restart.
        """
        with self._unwatched():
            if not only_reads(call):
                self._maintenance.note_modified()
                if self._fence is not None:
                    self._fence.mark_modified()
            results = self._executor.call_workers(call)
            if call.method == "reload_weights" and not any(map(has_failed, results)):
                self._maintenance.note_reloaded()
            return UtilityResult(call.call_id, workers=results)

    def _on_workers(self, method: str, *args: object) -> list[Any]:
        """Our own call of a worker's method; results by rank, or what one of them raised."""
        results = self._executor.call_workers(encode_call(0, method, args, None))
        try:
            return decode_results(results)
        except HeadraceError:
            raise
        except Exception as error:
            logger.warning("%s failed on a worker", method, exc_info=error)
            raise RequestFailedError(f"{method}: {type(error).__name__}: {error}") from error

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        """What is done here may take longer than a step."""
        if self._fence is not None:
            self._fence.beat(is_watched=False)
        try:
            yield
        finally:
            self.beat()

    def check(self) -> None:
        """Raise EngineDeadError if a worker is gone."""
        self._executor.check()

    def idle_check(self) -> None:
        """Check the block accounting while nothing runs; mismatches are healed and counted."""
        for problem in self._scheduler.check_integrity():
            logger.error("block accounting: %s (healed)", problem)

    def close(self) -> None:
        """Stop what runs in the background, where the process goes on without this object."""
        self._executor.shutdown()
