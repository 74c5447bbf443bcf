"""One HTTP request running on the engine: its prompts side by side, its usage, its answer."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from fastapi import Response
from msgspec import UNSET, UnsetType

from headrace.configs.errors import HeadraceError, InvalidRequestError, RequestFailedError
from headrace.configs.sampling_params import SamplingParams
from headrace.frontend.admission import RenderedPrompt
from headrace.frontend.http.call import Call
from headrace.frontend.http.engine import ServingEngine
from headrace.frontend.http.health import json_response
from headrace.frontend.http.metrics import ServerMetrics
from headrace.frontend.http.protocol import GenerationBody, StreamOptions
from headrace.frontend.http.responses import PromptTokensDetails, Usage
from headrace.frontend.http.sse import DONE, EventStreamResponse, encode_event
from headrace.frontend.outputs import CompletionOutput, RequestOutput


class ResponseFormat(Protocol):
    """How completions or chat write what the engine gives; one object per request."""

    def chunks(
        self, choice: int, output: CompletionOutput, usage: "UsageCounter"
    ) -> Iterable[msgspec.Struct]:
        """Events for a delta of choice number `choice` (over all prompts)."""
        ...

    def usage_chunk(self, usage: Usage) -> msgspec.Struct:
        """The last event of a stream whose client asked for usage."""
        ...

    def whole(self, choices: list[CompletionOutput], usage: Usage) -> msgspec.Struct:
        """The body of a response that is not streamed, from all choices in order."""
        ...


class UsageReport:
    """Where a stream carries usage: `at_end` in an event of its own, or also in every chunk."""

    def __init__(self, options: StreamOptions | None) -> None:
        self.at_end = options is not None and bool(options.include_usage)
        self._in_chunks = options is not None and bool(options.continuous_usage_stats)

    def in_chunk(self, counter: "UsageCounter") -> Usage | UnsetType | None:
        """The `usage` of a chunk: no such key unless the client asked for usage."""
        if not self.at_end:
            return UNSET
        return counter.usage() if self._in_chunks else None


class UsageCounter:
    """Token counts so far."""

    def __init__(self, prompts: list[RenderedPrompt]) -> None:
        self._num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self._num_cached = [0] * len(prompts)
        self._num_generated = 0

    def add(self, prompt_index: int, output: RequestOutput) -> int:
        """Count an output; returns its number of new tokens."""
        num_new = sum(len(choice.token_ids) for choice in output.outputs)
        self._num_generated += num_new
        if output.num_cached_tokens is not None:
            self._num_cached[prompt_index] = output.num_cached_tokens
        return num_new

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            total_tokens=self._num_prompt_tokens + self._num_generated,
            completion_tokens=self._num_generated,
            prompt_tokens_details=PromptTokensDetails(sum(self._num_cached)),
        )


@dataclass
class Generation:
    """What to run, and what is counted while it runs. `params.output_kind` says how it comes."""

    engine: ServingEngine
    metrics: ServerMetrics
    response_id: str
    prompts: list[RenderedPrompt]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None

    async def outputs(self, usage: UsageCounter) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(prompt index, output) as they come. Closing it aborts what still runs."""
        num_open = len(self.prompts) * self.params.n
        reason = "abort"
        try:
            async with contextlib.aclosing(_merge([self._run(i) for i in self._indexes()])) as runs:
                async for index, output in runs:
                    self.metrics.count_generated(usage.add(index, output))
                    for choice in output.outputs:
                        if choice.finish_reason is not None:
                            num_open -= 1
                            self.metrics.count_finished(choice.finish_reason)
                    yield index, output
        except HeadraceError as error:
            reason = "error"
            if isinstance(error, InvalidRequestError):
                num_open = 0
            raise
        finally:
            if num_open > 0:
                self.metrics.count_finished(reason, num_open)

    def _indexes(self) -> range:
        return range(len(self.prompts))

    async def _run(self, index: int) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        prompt = self.prompts[index]
        outputs = self.engine.generate(
            prompt,
            self.params,
            f"{self.response_id}-{index}",
            priority=self.priority,
            cache_salt=self.cache_salt,
        )
        is_first = True
        async with _closing(outputs):
            async for output in outputs:
                if is_first:
                    self.metrics.count_prompt(len(prompt.token_ids))
                    is_first = False
                yield index, output


async def respond(
    call: Call,
    body: GenerationBody,
    params: SamplingParams,
    render: Coroutine[Any, Any, list[RenderedPrompt]],
    make_format: Callable[[list[RenderedPrompt]], ResponseFormat],
) -> Response:
    """Render, run and write the answer; a stream if the body asks for one.

    Raises whatever ends the request before its first token; nothing runs on then.
    """
    connection = call.connection()
    try:
        prompts = await connection.run(render)
        generation = Generation(
            call.state.engine, call.state.metrics, call.response_id, prompts, params,
            body.priority or 0, body.cache_salt,
        )  # fmt: skip
        form = make_format(prompts)
        if not body.stream:
            response = json_response(await connection.run(_whole(generation, form)))
            connection.close()
            return response
        events = _events(generation, form, UsageReport(body.stream_options))
        return await EventStreamResponse.open(events, connection)
    except BaseException:
        connection.close()
        raise


async def _whole(generation: Generation, form: ResponseFormat) -> msgspec.Struct:
    usage = UsageCounter(generation.prompts)
    num_choices = generation.params.n
    choices: dict[int, CompletionOutput] = {}
    async with contextlib.aclosing(generation.outputs(usage)) as outputs:
        async for prompt_index, output in outputs:
            for choice in output.outputs:
                choices[prompt_index * num_choices + choice.index] = choice
    if len(choices) != num_choices * len(generation.prompts):
        raise RequestFailedError("the engine ended the request without all of its choices")
    return form.whole([choices[index] for index in sorted(choices)], usage.usage())


async def _events(
    generation: Generation, form: ResponseFormat, report: UsageReport
) -> AsyncGenerator[bytes, None]:
    usage = UsageCounter(generation.prompts)
    async with contextlib.aclosing(generation.outputs(usage)) as outputs:
        async for prompt_index, output in outputs:
            first_choice = prompt_index * generation.params.n
            events = [
                encode_event(chunk)
                for choice in output.outputs
                for chunk in form.chunks(first_choice + choice.index, choice, usage)
            ]
            if events:
                yield b"".join(events)
    if report.at_end:
        yield encode_event(form.usage_chunk(usage.usage()))
    yield DONE


async def _merge(
    runs: list[AsyncGenerator[tuple[int, RequestOutput], None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Items of all runs as they come. A consumer that is slow holds every run back."""
    if len(runs) == 1:
        async with contextlib.aclosing(runs[0]) as only_run:
            async for pair in only_run:
                yield pair
        return
    queue: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue(maxsize=1)

    async def pump(run: AsyncGenerator[tuple[int, RequestOutput], None]) -> None:
        try:
            async with contextlib.aclosing(run):
                async for pair in run:
                    await queue.put(pair)
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    pumps = [asyncio.create_task(pump(run)) for run in runs]
    num_open = len(pumps)
    try:
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


@contextlib.asynccontextmanager
async def _closing(outputs: AsyncIterator[RequestOutput]) -> AsyncIterator[None]:
    try:
        yield
    finally:
        if isinstance(outputs, AsyncGenerator):
            await outputs.aclose()
