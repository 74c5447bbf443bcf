"""One benchmark request over HTTP: sent, read event by event, and timed."""

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.frontend.cli.bench.http_target import AnswerError, Target, check_status, exchange

DONE = b"[DONE]"
MAX_ERROR_CHARS = 300


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


@dataclass(frozen=True)
class LoadRequest:
    """A request ready to send, and the lengths it asks for."""

    path: str
    body: bytes
    num_prompt_tokens: int | None  # None: not known before the server counts them
    max_tokens: int
    request_id: str


@dataclass
class Record:
    """What happened to one request. Times are time.perf_counter() seconds."""

    request: LoadRequest
    scheduled_at: float = 0.0  # when it should have been sent
    sent_at: float = 0.0
    event_times: list[float] = field(default_factory=list)  # of events with new text or tokens
    last_event_at: float = 0.0  # of the last event of a choice, also one that only ends it
    num_prompt_tokens: int | None = None  # as the server counts
    num_output_tokens: int | None = None  # as the server counts
    num_cached_tokens: int | None = None
    text: list[str] = field(default_factory=list)
    error_kind: str | None = None
    error: str = ""

    @property
    def is_success(self) -> bool:
        return self.error_kind is None

    @property
    def num_tokens(self) -> int:
        """Output tokens: what the server says, else one per event."""
        if self.num_output_tokens is not None:
            return self.num_output_tokens
        return len(self.event_times)

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first event with output."""
        return self.event_times[0] - self.sent_at

    @property
    def latency(self) -> float:
        """Seconds from sending to the last event."""
        return self.last_event_at - self.sent_at

    @property
    def itls(self) -> list[float]:
        """Seconds between events with output that follow each other."""
        return [later - earlier for earlier, later in itertools.pairwise(self.event_times)]

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None with fewer than two tokens."""
        if self.num_tokens < 2:
            return None
        return (self.event_times[-1] - self.event_times[0]) / (self.num_tokens - 1)


async def send(target: Target, record: Record, timeout_s: float) -> None:
    """Run the request of `record` and fill it in; failures are noted in it, never raised."""
    stream = _EventStream(record)
    request = record.request
    try:
        async with asyncio.timeout(timeout_s):
            answer = await exchange(
                target,
                "POST",
                request.path,
                request.body,
                stream.feed,
                {"X-Request-Id": request.request_id},
                lambda: stream.is_done,
            )
        record.sent_at = answer.sent_at
        check_status(answer)
        stream.check_end()
    except AnswerError as error:
        record.error_kind, record.error = error.kind, str(error)
    except TimeoutError:
        record.error_kind, record.error = "timeout", f"no end within {timeout_s:g} s"


class _EventStream:
    """Server-sent events, decoded as they come: what is kept of each is a time and its text."""

    def __init__(self, record: Record) -> None:
        self.is_done = False
        self._record = record
        self._rest = b""
        self._decoder = msgspec.json.Decoder(_Event)
        self._is_finished = False  # a choice said why it ended

    def feed(self, data: bytes, now: float) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), now)

    def check_end(self) -> None:
        """Raise AnswerError unless the stream came to a proper end with output in it."""
        if not (self.is_done or self._is_finished):
            raise AnswerError("cut stream", "the stream ended before its [DONE]")
        record = self._record
        if not record.event_times:
            if not record.last_event_at:
                raise AnswerError("no output", "the stream had no output")
            record.event_times.append(record.last_event_at)  # ended with its first token

    def _take(self, data: bytes, now: float) -> None:
        if data == DONE:
            self.is_done = True
            return
        try:
            event = self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise AnswerError("bad event", f"an event cannot be read: {error}") from error
        if event.error is not None:
            raise AnswerError("error in stream", str(event.error)[:MAX_ERROR_CHARS])
        for choice in event.choices:
            self._take_choice(choice, now)
        if event.usage is not None:
            self._take_usage(event.usage)

    def _take_choice(self, choice: _Choice, now: float) -> None:
        text, opens = choice.text or "", False
        if choice.delta is not None:
            delta = choice.delta
            text += delta.content or delta.reasoning or delta.reasoning_content or ""
            opens = delta.role is not None and not delta.tool_calls
        ends = choice.finish_reason is not None
        self._is_finished = self._is_finished or ends
        if not opens or text or ends:
            self._record.last_event_at = now
        if text or choice.token_ids or not (opens or ends):
            self._record.event_times.append(now)
            self._record.text.append(text)

    def _take_usage(self, usage: _Usage) -> None:
        record = self._record
        record.num_prompt_tokens = usage.prompt_tokens
        record.num_output_tokens = usage.completion_tokens
        details = usage.prompt_tokens_details
        record.num_cached_tokens = details.cached_tokens if details else None
