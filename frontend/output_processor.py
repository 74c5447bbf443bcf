"""Turns engine-core outputs into text: detokenizing, stop strings, log-probabilities, deltas.

One `OutputProcessor` serves all requests of a front end. A request's state lives here from `add`
until its last choice ends or it is dropped; nothing about a request is kept after that.
"""

import logging
import time
from dataclasses import dataclass, field
from typing import Protocol

from headrace.configs.errors import HeadraceError, RequestFailedError, error_from_code
from headrace.configs.sampling_params import RequestOutputKind, SamplingParams
from headrace.engine_core.messages import EngineCoreOutput, EngineCoreRequest
from headrace.frontend.detokenizer import IncrementalDetokenizer
from headrace.frontend.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from headrace.frontend.stop_strings import StopStrings
from headrace.workers.protocol import TokenLogprobs

logger = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """What text output needs of a tokenizer."""

    @property
    def strips_leading_space(self) -> bool: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def is_special(self, token_id: int) -> bool: ...


@dataclass
class Processed:
    """What one step meant for a request: an output or a failure; choices to abort in the core."""

    output: RequestOutput | None = None
    failure: HeadraceError | None = None
    aborts: list[int] = field(default_factory=list)


class ChoiceText:
    """Text of one choice, token by token: how steps cut the tokens never matters."""

    def __init__(self, index: int, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.text = ""
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.cumulative_logprob = None if params.logprobs is None else 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._params = params
        self._tokenizer = tokenizer
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        self._stops: StopStrings | None = None
        if params.stop_strings:
            self._stops = StopStrings(params.stop_strings, params.include_stop_str_in_output)
        self._sent_tokens = 0
        self._sent_text = 0

    def push(self, output: EngineCoreOutput) -> bool:
        """Take an output's tokens; True if a stop string ended the choice before the core did."""
        tokens, logprobs = _unseen(output, self.token_ids)
        num_new = len(tokens)
        hides_last = output.finish_reason == "stop" and not self._params.include_stop_str_in_output
        for i, token in enumerate(tokens):
            self.token_ids.append(token)
            if logprobs is not None:
                self._add_logprobs(logprobs[i])
            if hides_last and i == num_new - 1:
                break
            if self._push_token(token):
                return output.finish_reason is None
        if output.finish_reason is not None:
            self._finish(output.finish_reason, output.stop_reason)
        return False

    def _push_token(self, token: int) -> bool:
        if self._detokenizer is None:
            return False
        return self._push_text(self._detokenizer.push(token))

    def _push_text(self, text: str) -> bool:
        if self._stops is None:
            self.text += text
            return False
        can_stop = len(self.token_ids) >= self._params.min_tokens
        result = self._stops.push(text, can_stop)
        self.text += result.text_to_emit
        if result.matched is None:
            return False
        self.finish_reason, self.stop_reason = "stop", result.matched
        return True

    def _finish(self, reason: str, stop_reason: int | str | None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason
        if self._detokenizer is not None and self._push_text(self._detokenizer.flush()):
            return
        if self._stops is not None:
            self.text += self._stops.flush()

    def _add_logprobs(self, entry: TokenLogprobs) -> None:
        if self.logprobs is None or self.cumulative_logprob is None:
            return
        values: dict[int, Logprob] = {}
        for position, (token, value) in enumerate(
            zip(entry.token_ids, entry.logprobs, strict=True)
        ):
            rank = entry.rank if position == 0 else position
            if token not in values:
                values[token] = Logprob(value, rank, self._token_text(token))
        self.logprobs.append(values)
        self.cumulative_logprob += entry.logprobs[0]

    def _token_text(self, token: int) -> str | None:
        if self._tokenizer is None:
            return None
        return self._tokenizer.token_bytes(token).decode("utf-8", errors="replace")

    def snapshot(self, delta: bool) -> CompletionOutput:
        """The output so far, or what is new since the last snapshot."""
        first_token = self._sent_tokens if delta else 0
        first_char = self._sent_text if delta else 0
        self._sent_tokens, self._sent_text = len(self.token_ids), len(self.text)
        return CompletionOutput(
            index=self.index,
            text=self.text[first_char:],
            token_ids=self.token_ids[first_token:],
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else self.logprobs[first_token:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class RequestState:
    """One request in flight."""

    def __init__(
        self, request: EngineCoreRequest, label: str, prompt: str | None, kind: RequestOutputKind,
        tokenizer: Tokenizer | None,
    ) -> None:  # fmt: skip
        self.request = request
        self.label = label  # the caller's name for it: echoed, never a key
        self.prompt = prompt
        self.kind = kind
        self.num_cached_tokens = 0
        self.metrics = RequestMetrics(request.arrival_time, request.arrival_time)
        params = request.sampling_params
        self.choices = [ChoiceText(c.index, params, tokenizer) for c in request.choices]
        self._open = {choice.index for choice in self.choices}
        self._by_index = {choice.index: choice for choice in self.choices}
        self._sent_prompt = False

    @property
    def finished(self) -> bool:
        return not self._open

    def push(self, output: EngineCoreOutput) -> bool | None:
        """None if the choice had ended already; else whether the core must abort it."""
        if output.index not in self._open:
            return None
        choice = self._by_index[output.index]
        now = time.time()
        if output.new_token_ids:
            self.metrics.last_token_time = now
            if self.metrics.first_token_time is None:
                self.metrics.first_token_time = now
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        must_abort = choice.push(output)
        if choice.finish_reason is not None:
            self._open.discard(output.index)
        if self.finished:
            self.metrics.finished_time = now
        return must_abort

    def output(self, changed: set[int]) -> RequestOutput | None:
        """What to hand out after `changed` choices moved; None: nothing now, by the output kind."""
        if self.kind is RequestOutputKind.FINAL_ONLY and not self.finished:
            return None
        delta = self.kind is RequestOutputKind.DELTA
        shown = [c for c in self.choices if c.index in changed] if delta else self.choices
        with_prompt = not (delta and self._sent_prompt)
        self._sent_prompt = True
        return RequestOutput(
            request_id=self.label,
            prompt=self.prompt if with_prompt else None,
            prompt_token_ids=self.request.prompt_token_ids if with_prompt else None,
            prompt_logprobs=None,
            outputs=[choice.snapshot(delta) for choice in shown],
            finished=self.finished,
            metrics=self.metrics,
            num_cached_tokens=self.num_cached_tokens,
        )


class OutputProcessor:
    """All requests in flight of one front end."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._states: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def add(
        self, request: EngineCoreRequest, label: str, prompt: str | None, kind: RequestOutputKind
    ) -> None:
        """Start to follow a request; its outputs carry `label` as their request id."""
        self._states[request.request_id] = RequestState(
            request, label, prompt, kind, self._tokenizer
        )

    def drop(self, request_id: str) -> None:
        """Forget a request (its consumer went away); unknown ids are ignored."""
        self._states.pop(request_id, None)

    def process(self, outputs: list[EngineCoreOutput]) -> dict[str, Processed]:
        """Take one step's outputs; results by (internal) request id.

        Outputs of unknown ids are ignored.
        """
        changed: dict[str, set[int]] = {}
        results: dict[str, Processed] = {}
        for output in outputs:
            state = self._states.get(output.request_id)
            if state is None:
                continue
            result = results.setdefault(output.request_id, Processed())
            if output.fault is not None:
                self._fail(
                    state,
                    output.index,
                    error_from_code(output.fault.code, output.fault.message),
                    result,
                )
                continue
            try:
                must_abort = state.push(output)
            except Exception as error:  # the fence: one request's fault ends that request alone
                self._fail(state, None, _failure(error), result)
                continue
            if must_abort is None:
                continue
            changed.setdefault(output.request_id, set()).add(output.index)
            if must_abort:
                result.aborts.append(output.index)
        for request_id, indexes in changed.items():
            state = self._states.get(request_id)
            if state is None:
                continue
            results[request_id].output = state.output(indexes)
            if state.finished:
                del self._states[request_id]
        return results

    def _fail(
        self, state: RequestState, ended: int | None, error: HeadraceError, result: Processed
    ) -> None:
        """The request ends with `error`; its choices that the core still runs are aborted."""
        result.failure = error
        result.aborts += [
            choice.index
            for choice in state.choices
            if choice.finish_reason is None and choice.index != ended
        ]
        del self._states[state.request.request_id]


def _failure(error: Exception) -> HeadraceError:
    if isinstance(error, HeadraceError):
        return error
    logger.error("outputs of a request could not be processed", exc_info=error)
    return RequestFailedError(f"internal error: {type(error).__name__}")


def _unseen(
    output: EngineCoreOutput, known: list[int]
) -> tuple[list[int], list[TokenLogprobs] | None]:
    """The tokens of `output` that are new: exactly once, whatever is sent twice (recovery)."""
    overlap = len(known) - output.start
    if overlap < 0:
        raise RequestFailedError(
            f"request {output.request_id}: output {output.start} arrived, {len(known)} was next"
        )
    if known[output.start :] != output.new_token_ids[:overlap]:
        raise RequestFailedError(f"request {output.request_id}: a repeated output differs")
    logprobs = output.logprobs
    return output.new_token_ids[overlap:], None if logprobs is None else logprobs[overlap:]
