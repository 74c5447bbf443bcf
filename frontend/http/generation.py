"""One HTTP request running on the engine: its prompts side by side, and its answer."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import Response

from headrace.configs.errors import RequestFailedError
from headrace.frontend.admission import RenderedPrompt
from headrace.frontend.http.answer import Answer, UsageCounter
from headrace.frontend.http.call import Call
from headrace.frontend.http.engine import ServingEngine
from headrace.frontend.http.health import json_response
from headrace.frontend.http.protocol import GenerationBody
from headrace.frontend.http.queue_gate import QueueGate
from headrace.frontend.http.sampling import SamplingPlan, check_cost
from headrace.frontend.http.sse import DONE, EventStreamResponse, encode_event
from headrace.frontend.output_stream import OutputStream
from headrace.frontend.outputs import CompletionOutput, RequestOutput

AnyAnswer = Answer[Any]


@dataclass(frozen=True)
class Generation:
    """What to run. `plan.params.output_kind` says how outputs come."""

    engine: ServingEngine
    queue: QueueGate
    response_id: str
    prompts: list[RenderedPrompt]
    plan: SamplingPlan
    priority: int
    has_usage_details: bool
    rank: int | None = None  # of the replica that is to run it

    def usage_counter(self) -> UsageCounter:
        return UsageCounter(self.prompts, self.has_usage_details)


class Run:
    """The prompts of a request on the engine, side by side, from construction to `close()`."""

    def __init__(self, generation: Generation, on_news: Callable[[], None]) -> None:
        """`on_news` is called when there is something to take, by whoever brings it.

        Raises RequestRefused and InvalidRequestError, and nothing runs then.
        """
        self.num_open = len(generation.prompts)
        self._keeps_output = generation.plan.keeps_output
        self._on_news = on_news
        self._streams: list[OutputStream] = []
        self._changed: dict[int, None] = {}  # prompts with something to take
        self._closing = contextlib.ExitStack()
        try:
            lengths = [len(prompt.token_ids) for prompt in generation.prompts]
            self._closing.enter_context(generation.queue.admitted(lengths))
            for index in range(len(generation.prompts)):
                self._submit(generation, index)
        except BaseException:
            self.close()
            raise

    def _submit(self, generation: Generation, index: int) -> None:
        stream = generation.engine.submit(
            generation.prompts[index],
            generation.plan.params,
            f"{generation.response_id}-{index}",
            priority=generation.priority,
            data_parallel_rank=generation.rank,
        )
        self._streams.append(stream)
        self._closing.callback(generation.engine.release, stream)
        stream.listen(lambda: self._note(index))

    def _note(self, index: int) -> None:
        self._changed[index] = None
        self._on_news()

    def take(self) -> list[tuple[int, RequestOutput]]:
        """(prompt index, output) of all that is new.

        Raises what ended a prompt, once everything that came before it was taken.
        """
        news: list[tuple[int, RequestOutput]] = []
        for index in list(self._changed):
            stream = self._streams[index]
            try:
                output = stream.take()
            except Exception:
                if news:
                    break
                raise
            if not stream.has_news:
                del self._changed[index]
            if output is None:
                continue
            if not self._keeps_output:
                output.outputs = [_without_tokens(choice) for choice in output.outputs]
            self.num_open -= output.finished
            news.append((index, output))
        return news

    def close(self) -> None:
        """Abort what still runs. Idempotent."""
        self._closing.close()


async def respond(
    call: Call,
    body: GenerationBody,
    plan: SamplingPlan,
    render: Coroutine[Any, Any, list[RenderedPrompt]],
    make_answer: Callable[[list[RenderedPrompt]], AnyAnswer],
) -> Response:
    """Render, run and write the answer; a stream if the body asks for one.

    Raises whatever ends the request before its first token; nothing runs on then.
    """
    connection = call.connection()
    try:
        prompts = await connection.run(render)
        call.warnings += [warning for prompt in prompts for warning in prompt.warnings]
        check_cost(plan, [len(prompt.token_ids) for prompt in prompts], call.rules())
        call.state.request_log.received(call.response_id, call.label, prompts)
        options = call.state.options
        generation = Generation(
            call.state.engine,
            call.state.queue,
            call.response_id,
            prompts,
            plan,
            call.priority(body.priority),
            options.enable_prompt_tokens_details,
            call.pinned_rank,
        )
        answer = make_answer(prompts)
        if not body.stream:
            response = json_response(await connection.run(_whole(generation, answer)))
            connection.close()
            return response
        return await EventStreamResponse.open(
            AnswerEvents(generation, answer), connection, options.sse_keep_alive_interval
        )
    except BaseException:
        connection.close()
        raise


async def _whole(generation: Generation, answer: AnyAnswer) -> msgspec.Struct:
    usage = generation.usage_counter()
    num_choices = generation.plan.n
    choices: dict[int, CompletionOutput] = {}
    news = asyncio.Event()
    with contextlib.closing(Run(generation, news.set)) as run:
        while run.num_open:
            await news.wait()
            news.clear()
            while outputs := run.take():
                for prompt_index, output in outputs:
                    usage.add(prompt_index, output)
                    answer.note_prompt(prompt_index, output)
                    for choice in output.outputs:
                        choices[prompt_index * num_choices + choice.index] = choice
    if len(choices) != num_choices * len(generation.prompts):
        raise RequestFailedError("the engine ended the request without all of its choices")
    return answer.whole([choices[index] for index in sorted(choices)], usage.usage())


class AnswerEvents:
    """The events of a streamed answer, an `EventSource`."""

    def __init__(self, generation: Generation, answer: AnyAnswer) -> None:
        self.is_over = False
        self._generation = generation
        self._answer = answer
        self._usage = generation.usage_counter()
        self._run: Run | None = None

    def start(self, on_news: Callable[[], None]) -> None:
        self._run = Run(self._generation, on_news)

    def take(self) -> bytes:
        run, answer, usage = self._run, self._answer, self._usage
        assert run is not None, "start() comes first"
        events: list[bytes] = []
        for prompt_index, output in run.take():
            usage.add(prompt_index, output)
            answer.note_prompt(prompt_index, output)
            first_choice = prompt_index * self._generation.plan.n
            for choice in output.outputs:
                events += answer.events(first_choice + choice.index, choice, usage)
        if not run.num_open:
            self.is_over = True
            if answer.report.at_end:
                events.append(encode_event(answer.usage_chunk(usage.usage())))
            events.append(DONE)
        return b"".join(events)

    def close(self) -> None:
        if self._run is not None:
            self._run.close()


def _without_tokens(choice: CompletionOutput) -> CompletionOutput:
    """The choice as if nothing had been generated: it ends by its length limit, which is 0."""
    reason = "length" if choice.finish_reason == "stop" else choice.finish_reason
    return CompletionOutput(choice.index, "", [], None, None, reason)
