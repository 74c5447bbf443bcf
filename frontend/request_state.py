"""One request in flight: tokens become text, text is cut at stop strings, outputs are made."""

import math

from headrace.configs.sampling_params import RequestOutputKind, SamplingParams
from headrace.engine_core.messages import EngineCoreOutput, EngineCoreRequest
from headrace.frontend.completion_view import ChoiceContent, CompletionView
from headrace.frontend.detokenizer import IncrementalDetokenizer, TokenTable
from headrace.frontend.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from headrace.frontend.stats import FinishedRequest, IterationStats
from headrace.frontend.stop_strings import StopStrings
from headrace.workers.protocol import TokenLogprobs


class Choice:
    """One choice, token by token: how steps cut the tokens never matters."""

    def __init__(self, index: int, params: SamplingParams, tokenizer: TokenTable | None) -> None:
        self.index = index
        self.content = ChoiceContent(params.returns_logprobs)
        self.cumulative_logprob = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.last_token_time: float | None = None
        self.num_preemptions = 0
        self._params = params
        self._tokenizer = tokenizer
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        self._stops: StopStrings | None = None
        if params.stop_strings:
            self._stops = StopStrings(params.stop_strings, params.include_stop_str_in_output)
        self._sent = self.content.size()

    def push(self, output: EngineCoreOutput) -> tuple[int, bool]:
        """Take an output's tokens, all of which are new: the client's ledger sees to that.

        Returns how many were new, and whether a stop string ended the choice before the core did.
        """
        known = self.content.token_ids
        num_before = len(known)
        tokens, logprobs = output.new_token_ids, output.logprobs
        hides_last = output.finish_reason == "stop" and not self._params.include_stop_str_in_output
        self.num_preemptions = max(self.num_preemptions, output.num_preemptions)
        for i, token in enumerate(tokens):
            known.append(token)
            if logprobs is not None:
                self._add_logprobs(logprobs[i])
            if hides_last and i == len(tokens) - 1:
                break
            if self._detokenizer is not None and self._push_text(self._detokenizer.push(token)):
                return len(known) - num_before, output.finish_reason is None
        if output.finish_reason is not None:
            self._finish(output.finish_reason, output.stop_reason)
        return len(known) - num_before, False

    def _push_text(self, text: str) -> bool:
        if self._stops is None:
            self.content.text.append(text)
            return False
        can_stop = len(self.content.token_ids) >= self._params.min_tokens
        result = self._stops.push(text, can_stop)
        self.content.text.append(result.text_to_emit)
        if result.matched is None:
            return False
        self.finish_reason, self.stop_reason = "stop", result.matched
        return True

    def _finish(self, reason: str, stop_reason: int | str | None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason
        if self._detokenizer is not None and self._push_text(self._detokenizer.flush()):
            return
        if self._stops is not None:
            self.content.text.append(self._stops.flush())

    def _add_logprobs(self, entry: TokenLogprobs) -> None:
        self.cumulative_logprob += entry.logprobs[0]
        if self.content.logprobs is not None:
            self.content.logprobs.append(logprob_dict(entry, self._tokenizer))

    def snapshot(self, kind: RequestOutputKind) -> CompletionOutput:
        """The output so far, or what is new since the last snapshot."""
        is_delta = kind is RequestOutputKind.DELTA
        stop = self.content.size()
        start, self._sent = self._sent if is_delta else (0, 0), stop
        logprob = self.cumulative_logprob if self._params.returns_logprobs else None
        return CompletionView(
            self.index, self.content, start, stop, logprob, self.finish_reason, self.stop_reason,
            is_delta,
        )  # fmt: skip


class RequestState:
    """One request, from admission to the end of its last choice."""

    def __init__(
        self,
        request: EngineCoreRequest,
        label: str,
        prompt: str | None,
        kind: RequestOutputKind,
        tokenizer: TokenTable | None,
    ) -> None:
        params = request.sampling_params
        self.request = request
        self.label = label  # the caller's name for it: echoed, never a key
        self.metrics = RequestMetrics(request.arrival_time, request.arrival_time)
        self.choices = [Choice(c.index, params, tokenizer) for c in request.choices]
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._ranks = params.num_returned < params.n
        # Which choices are the best is known only at the end.
        self._kind = RequestOutputKind.FINAL_ONLY if self._ranks else kind
        self._num_cached_tokens = 0
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = [None]  # nothing comes before the first token
        self._by_index = {choice.index: choice for choice in self.choices}
        self._open = set(self._by_index)
        self._sent_prompt = False

    @property
    def finished(self) -> bool:
        return not self._open

    def open_choices(self) -> list[int]:
        """Indexes of the choices that have not ended."""
        return sorted(self._open)

    def push(self, output: EngineCoreOutput, iteration: IterationStats) -> tuple[bool, bool]:
        """Take an output; returns whether there is news, and whether the core must be told to stop.

        What it means for the statistics goes into `iteration`.
        """
        if output.index not in self._open:
            return False, False
        choice = self._by_index[output.index]
        self._note_start(output)
        num_new, must_abort = choice.push(output)
        if num_new:
            self._note_tokens(choice, num_new, iteration)
        if choice.finish_reason is not None:
            self._open.discard(output.index)
            if self.finished:
                self.metrics.finished_time = iteration.now
        return num_new > 0 or choice.finish_reason is not None, must_abort

    def _note_start(self, output: EngineCoreOutput) -> None:
        scheduled = output.first_scheduled_time
        if scheduled is not None and self.metrics.first_scheduled_time is None:
            self.metrics.first_scheduled_time = scheduled
            self.metrics.time_in_queue = scheduled - self.metrics.arrival_time
        if output.num_cached_tokens > self._num_cached_tokens:
            self._num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None and self._prompt_logprobs is not None:
            self._prompt_logprobs += [
                logprob_dict(entry, self._tokenizer) for entry in output.prompt_logprobs
            ]

    def _note_tokens(self, choice: Choice, num_new: int, iteration: IterationStats) -> None:
        metrics, now = self.metrics, iteration.now
        if metrics.first_token_time is None:
            metrics.first_token_time = now
            iteration.time_to_first_tokens.append(now - metrics.arrival_time)
            iteration.num_prompt_tokens += len(self.request.prompt_token_ids)
            iteration.num_cached_tokens += self._num_cached_tokens
        if choice.last_token_time is not None:
            iteration.inter_token_latencies.append(now - choice.last_token_time)
        iteration.num_generation_tokens += num_new
        metrics.last_token_time = choice.last_token_time = now

    def output(self, changed: set[int], weight_version: str = "") -> RequestOutput | None:
        """What to hand out after `changed` choices moved; None: nothing now, by the output kind.

        `weight_version`: of the weights that moved them, "" if that is not known.
        """
        if self._kind is RequestOutputKind.FINAL_ONLY and not self.finished:
            return None
        is_delta = self._kind is RequestOutputKind.DELTA
        shown = [c for c in self.choices if c.index in changed] if is_delta else self.choices
        outputs = [choice.snapshot(self._kind) for choice in shown]
        with_prompt = not (is_delta and self._sent_prompt)
        if not self._sent_prompt:
            self._sent_prompt = any(c.content.token_ids for c in self.choices)
        return RequestOutput(
            request_id=self.label,
            prompt=self._prompt if with_prompt else None,
            prompt_token_ids=self.request.prompt_token_ids if with_prompt else None,
            prompt_logprobs=self._prompt_logprobs if with_prompt else None,
            outputs=self._best(outputs) if self._ranks else outputs,
            finished=self.finished,
            metrics=self.metrics,
            num_cached_tokens=self._num_cached_tokens,
            weight_version=weight_version or None,
        )

    def _best(self, outputs: list[CompletionOutput]) -> list[CompletionOutput]:
        """The `num_returned` most probable sequences, best first, numbered anew."""
        order = sorted(
            range(len(outputs)), key=lambda i: _rank_key(self.choices[i].cumulative_logprob)
        )
        best = [outputs[i] for i in order[: self.request.sampling_params.num_returned]]
        for position, completion in enumerate(best):
            completion.index = position
        return best

    def record(self, now: float, reason: str) -> FinishedRequest:
        """The request's line in the statistics; `reason` is that of choices still open."""
        params, metrics = self.request.sampling_params, self.metrics
        return FinishedRequest(
            n=params.num_returned,
            max_tokens=params.max_tokens,
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_cached_tokens=self._num_cached_tokens,
            num_generation_tokens=[len(c.content.token_ids) for c in self.choices],
            finish_reasons=[c.finish_reason or reason for c in self.choices],
            num_preemptions=sum(c.num_preemptions for c in self.choices),
            arrival_time=metrics.arrival_time,
            first_scheduled_time=metrics.first_scheduled_time,
            first_token_time=metrics.first_token_time,
            last_token_time=metrics.last_token_time,
            finished_time=now,
        )


def logprob_dict(entry: TokenLogprobs, tokenizer: TokenTable | None) -> dict[int, Logprob]:
    """The token itself first, then the most likely ones by rank.

    The text of a token that holds part of a character has U+FFFD for it; the exact bytes are the
    tokenizer's `token_bytes`.
    """
    values: dict[int, Logprob] = {}
    for position, (token, value) in enumerate(zip(entry.token_ids, entry.logprobs, strict=True)):
        if token not in values:
            text = tokenizer.token_bytes(token).decode("utf-8", "replace") if tokenizer else None
            values[token] = Logprob(value, entry.rank if position == 0 else position, text)
    return values


def _rank_key(cumulative_logprob: float) -> float:
    return math.inf if math.isnan(cumulative_logprob) else -cumulative_logprob
