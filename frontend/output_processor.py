"""Turns engine-core outputs into text: detokenizing, stop strings, log-probabilities, deltas.

One `OutputProcessor` serves all requests of a front end. A request's state lives here from `add`
until its last choice ends or it is dropped; nothing about a request is kept after that, but for its
line in the statistics, which goes out once.
"""

import logging
import time
from dataclasses import dataclass, field

from headrace.configs.errors import HeadraceError, RequestFailedError, error_from_code
from headrace.configs.sampling_params import RequestOutputKind
from headrace.engine_core.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from headrace.frontend.detokenizer import TokenTable
from headrace.frontend.outputs import RequestOutput
from headrace.frontend.request_state import RequestState
from headrace.frontend.stats import FinishedRequest, IterationStats

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Processed:
    """What one step meant for a request: an output or a failure; choices to abort in the core."""

    label: str  # the caller's name for the request
    output: RequestOutput | None = None
    failure: HeadraceError | None = None
    aborts: list[int] = field(default_factory=list)


@dataclass
class ProcessedStep:
    """What one message of the engine core meant: results by (internal) request id, statistics."""

    results: dict[str, Processed]
    iteration: IterationStats


class OutputProcessor:
    """All requests in flight of one front end."""

    def __init__(self, tokenizer: TokenTable | None) -> None:
        """Without a tokenizer, outputs have token ids and no text."""
        self.tokenizer = tokenizer
        self._states: dict[str, RequestState] = {}
        self._dropped: list[FinishedRequest] = []  # since the last message

    def __len__(self) -> int:
        return len(self._states)

    def add(
        self, request: EngineCoreRequest, label: str, prompt: str | None, kind: RequestOutputKind
    ) -> None:
        """Start to follow a request; its outputs carry `label` as their request id."""
        self._states[request.request_id] = RequestState(
            request, label, prompt, kind, self.tokenizer
        )

    def drop(self, request_id: str, reason: str = "abort") -> None:
        """Forget a request (its consumer went away); unknown ids are ignored.

        The statistics of the next message count it, with `reason` for choices that still ran.
        """
        state = self._states.pop(request_id, None)
        if state is not None:
            self._dropped.append(state.record(time.time(), reason))

    def process(self, message: EngineCoreOutputs) -> ProcessedStep:
        """Take what one step produced. Outputs of unknown ids are ignored."""
        iteration = IterationStats(now=message.timestamp or time.time(), finished=self._dropped)
        self._dropped = []
        changed: dict[str, set[int]] = {}
        results: dict[str, Processed] = {}
        states = self._states
        for output in message.outputs:
            request_id = output.request_id
            state = states.get(request_id)
            if state is None:
                continue
            result = results.get(request_id)
            if result is None:
                result = results[request_id] = Processed(state.label)
            if self._push(state, output, result, iteration):
                if request_id in changed:
                    changed[request_id].add(output.index)
                else:
                    changed[request_id] = {output.index}
        for request_id, indexes in changed.items():
            state = states.get(request_id)
            if state is None:
                continue
            results[request_id].output = state.output(indexes, message.weight_version)
            if state.finished:
                iteration.finished.append(state.record(iteration.now, "stop"))
                del self._states[request_id]
        return ProcessedStep(results, iteration)

    def _push(
        self,
        state: RequestState,
        output: EngineCoreOutput,
        result: Processed,
        iteration: IterationStats,
    ) -> bool:
        """Whether the choice has news. Whatever goes wrong ends this request alone."""
        if output.fault is not None:
            error = error_from_code(output.fault.code, output.fault.message)
            self._fail(state, output.index, error, result, iteration)
            return False
        try:
            has_news, must_abort = state.push(output, iteration)
        except Exception as error:
            self._fail(state, None, _failure(error), result, iteration)
            return False
        if must_abort:
            result.aborts.append(output.index)
        return has_news

    def _fail(
        self,
        state: RequestState,
        ended: int | None,
        error: HeadraceError,
        result: Processed,
        iteration: IterationStats,
    ) -> None:
        """The request ends with `error`; its choices that the core still runs are aborted."""
        result.failure = error
        result.aborts += [index for index in state.open_choices() if index != ended]
        iteration.finished.append(state.record(iteration.now, "error"))
        del self._states[state.request.request_id]


def _failure(error: Exception) -> HeadraceError:
    if isinstance(error, HeadraceError):
        return error
    logger.error("outputs of a request could not be processed", exc_info=error)
    return RequestFailedError(f"internal error: {type(error).__name__}")
