"""What the answers of completions and chat have in common: whole, or in chunks as they come."""

import secrets
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from headrace.frontend.admission import RenderedPrompt
from headrace.frontend.completion_view import CompletionView
from headrace.frontend.http.call import Call
from headrace.frontend.http.logprobs import LogprobFormat, Scores
from headrace.frontend.http.protocol import GenerationBody, StreamOptions
from headrace.frontend.http.responses import (
    EffectiveParams,
    PromptLogprobs,
    PromptTokensDetails,
    Usage,
)
from headrace.frontend.http.sampling import SamplingPlan, effective_params
from headrace.frontend.http.sse import encode_event
from headrace.frontend.outputs import CompletionOutput, RequestOutput

DeltaT = TypeVar("DeltaT", bound=msgspec.Struct)
_PLACE = secrets.token_hex(16)  # stands for a text; nothing else in an event can equal it
_encode = msgspec.json.Encoder().encode


class UsageCounter:
    """Token counts so far. `has_details`: how much of the prompts was cached is told, too."""

    def __init__(self, prompts: list[RenderedPrompt], has_details: bool) -> None:
        self._num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self._num_cached = [0] * len(prompts)
        self._num_generated = 0
        self._has_details = has_details

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Count an output."""
        for choice in output.outputs:
            if isinstance(choice, CompletionView):
                self._num_generated += choice.num_tokens
            else:
                self._num_generated += len(choice.token_ids)
        if output.num_cached_tokens is not None:
            self._num_cached[prompt_index] = output.num_cached_tokens

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            total_tokens=self._num_prompt_tokens + self._num_generated,
            completion_tokens=self._num_generated,
            prompt_tokens_details=(
                PromptTokensDetails(sum(self._num_cached)) if self._has_details else None
            ),
        )


class UsageReport:
    """Where a stream carries usage: `at_end` in an event of its own, or also in every chunk.

    `forced`: the operator wants both in every stream.
    """

    def __init__(self, options: StreamOptions | None, forced: bool) -> None:
        self.at_end = forced or (options is not None and bool(options.include_usage))
        in_chunks = forced or (options is not None and bool(options.continuous_usage_stats))
        self.is_in_chunks = self.at_end and in_chunks

    def in_chunk(self, counter: UsageCounter) -> Usage | UnsetType | None:
        """The `usage` of a chunk: no such key unless the client asked for usage."""
        if not self.at_end:
            return UNSET
        return counter.usage() if self.is_in_chunks else None


class TextFrame(msgspec.Struct, frozen=True):
    """The bytes of an event before and after its text, a JSON string."""

    before: bytes
    after: bytes


class ChunkFrame(msgspec.Struct, frozen=True):
    """What a chunk has beside its choices."""

    usage: Usage | UnsetType | None
    fingerprint: str | UnsetType
    effective_params: EffectiveParams
    is_first: bool  # of its choice
    weight_version: str | UnsetType = UNSET


class Answer(ABC, Generic[DeltaT]):
    """Writes what the engine gives for one request in the form of one route.

    Choices are numbered over all prompts: prompts outer, choices of a prompt inner.
    """

    def __init__(
        self, call: Call, body: GenerationBody, plan: SamplingPlan, prompts: list[RenderedPrompt]
    ) -> None:
        options, config = call.state.options, call.config
        self.id = call.response_id
        self.created = call.created
        self.model = config.served_model_name
        self.fingerprint = call.fingerprint
        self.report = UsageReport(body.stream_options, options.enable_force_include_usage)
        self.plan = plan
        self.prompts = prompts
        self.returns_ids = bool(body.return_token_ids)
        self.weight_version: str | UnsetType = UNSET
        as_ids = body.return_tokens_as_token_ids
        self.scores = LogprobFormat(
            call.state.engine.tokenizer,
            options.return_tokens_as_token_ids if as_ids is None else as_ids,
        )
        self.effective: EffectiveParams = UNSET
        if body.return_effective_params:
            room = config.max_model_len - min(len(prompt.token_ids) for prompt in prompts)
            self.effective = effective_params(plan, config, room)
        self._shows_tokens = plan.num_logprobs is not None or self.returns_ids
        self._is_text_all = not (self._shows_tokens or self.report.is_in_chunks)
        self._text_frames: dict[int, TextFrame] = {}
        self._prompt_scores: dict[int, list[Scores | None]] = {}
        self._started: set[int] = set()
        self._is_first_chunk = True

    @abstractmethod
    def openings(self, choice: int) -> list[DeltaT]:
        """What a stream has of a choice before anything that was generated."""

    @abstractmethod
    def delta(self, choice: int, output: CompletionOutput) -> DeltaT:
        """What is new of a choice."""

    @abstractmethod
    def chunk(self, choices: list[DeltaT], frame: ChunkFrame) -> msgspec.Struct:
        """One event of a stream."""

    @abstractmethod
    def whole(self, choices: list[CompletionOutput], usage: Usage) -> msgspec.Struct:
        """The body of a response that is not streamed, from all choices in order."""

    def note_prompt(self, prompt_index: int, output: RequestOutput) -> None:
        """Remember the prompt's scores, which come with one output of its request, and weights."""
        if output.weight_version is not None:
            self.weight_version = output.weight_version
        if output.prompt_logprobs is not None and self.plan.params.prompt_logprobs is not None:
            self._prompt_scores[prompt_index] = output.prompt_logprobs

    def events(self, choice: int, output: CompletionOutput, usage: UsageCounter) -> list[bytes]:
        """Events for a delta of a choice, encoded; none while its text is held back."""
        frame = self._text_frames.get(choice)
        if frame is not None and output.finish_reason is None:
            text = output.text
            return [frame.before + _encode(text) + frame.after] if text else []
        events = [encode_event(chunk) for chunk in self.chunks(choice, output, usage)]
        if events and self._is_text_all and output.finish_reason is None:
            self._text_frames[choice] = self._text_frame(choice)
        return events

    def _text_frame(self, choice: int) -> TextFrame:
        """What is the same in all further events of a choice but the last one.

        For a stream whose chunks tell of nothing but text.
        """
        delta = self.delta(choice, CompletionOutput(choice, _PLACE, [], None, None))
        usage = None if self.report.at_end else UNSET
        event = encode_event(self._framed(delta, choice, usage, is_last=False))
        before, after = event.split(_encode(_PLACE))
        return TextFrame(before, after)

    def chunks(
        self, choice: int, output: CompletionOutput, usage: UsageCounter
    ) -> list[msgspec.Struct]:
        """Events for a delta of a choice; none while its text is held back."""
        events: list[msgspec.Struct] = []
        counts = self.report.in_chunk(usage)
        if self.is_new(choice):
            for opening in self.openings(choice):
                events.append(self._framed(opening, choice, counts, is_last=False))
        is_end = output.finish_reason is not None
        if is_end or output.text or (self._shows_tokens and output.token_ids):
            delta = self.delta(choice, output)
            events.append(self._framed(delta, choice, counts, is_end and not self.report.at_end))
        return events

    def usage_chunk(self, usage: Usage) -> msgspec.Struct:
        """The last event of a stream whose client asked for usage."""
        frame = ChunkFrame(usage, self.fingerprint, UNSET, False, self.weight_version)
        return self.chunk([], frame)

    def prompt_of(self, choice: int) -> RenderedPrompt:
        return self.prompts[choice // self.plan.n]

    def is_new(self, choice: int) -> bool:
        """Whether no chunk has told of a choice yet."""
        return choice not in self._started

    def prompt_scores(self, choice: int) -> list[Scores | None] | None:
        """Scores of the tokens of a choice's prompt, None unless the engine was asked for them."""
        return self._prompt_scores.get(choice // self.plan.n)

    def prompt_logprobs(self, choice: int) -> PromptLogprobs | None:
        """The answer to `prompt_logprobs`."""
        scores, num_top = self.prompt_scores(choice), self.plan.num_prompt_logprobs
        if scores is None or num_top is None:
            return None
        return self.scores.prompt(self.prompt_of(choice).token_ids, scores, num_top)

    def token_ids(self, output: CompletionOutput) -> list[int] | None:
        return list(output.token_ids) if self.returns_ids else None

    def _framed(
        self, delta: DeltaT, choice: int, usage: Usage | UnsetType | None, is_last: bool
    ) -> msgspec.Struct:
        frame = ChunkFrame(
            usage,
            self.fingerprint if is_last else UNSET,
            self.effective if self._is_first_chunk else UNSET,
            is_first=self.is_new(choice),
            weight_version=self.weight_version if is_last else UNSET,
        )
        self._started.add(choice)
        self._is_first_chunk = False
        return self.chunk([delta], frame)
