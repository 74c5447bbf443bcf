"""One HTTP request running on the engine: its prompts side by side, and its answer."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
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
from headrace.frontend.outputs import CompletionOutput, RequestOutput

AnyAnswer = Answer[Any]
Outputs = AsyncGenerator[tuple[int, RequestOutput], None]


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

    def usage_counter(self) -> UsageCounter:
        return UsageCounter(self.prompts, self.has_usage_details)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Outputs]:
        """(prompt index, output) as they come. What still runs at the end is aborted."""
        with self.queue.admitted([len(prompt.token_ids) for prompt in self.prompts]):
            runs = [self._run(index) for index in range(len(self.prompts))]
            async with contextlib.aclosing(runs[0] if len(runs) == 1 else _merge(runs)) as outputs:
                yield outputs

    async def _run(self, index: int) -> Outputs:
        outputs = self.engine.generate(
            self.prompts[index],
            self.plan.params,
            f"{self.response_id}-{index}",
            priority=self.priority,
        )
        async with _closing(outputs):
            async for output in outputs:
                if not self.plan.keeps_output:
                    output.outputs = [_without_tokens(choice) for choice in output.outputs]
                yield index, output


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
        )
        answer = make_answer(prompts)
        if not body.stream:
            response = json_response(await connection.run(_whole(generation, answer)))
            connection.close()
            return response
        return await EventStreamResponse.open(
            _events(generation, answer), connection, options.sse_keep_alive_interval
        )
    except BaseException:
        connection.close()
        raise


async def _whole(generation: Generation, answer: AnyAnswer) -> msgspec.Struct:
    usage = generation.usage_counter()
    num_choices = generation.plan.n
    choices: dict[int, CompletionOutput] = {}
    async with generation.running() as outputs:
        async for prompt_index, output in outputs:
            usage.add(prompt_index, output)
            answer.note_prompt(prompt_index, output)
            for choice in output.outputs:
                choices[prompt_index * num_choices + choice.index] = choice
    if len(choices) != num_choices * len(generation.prompts):
        raise RequestFailedError("the engine ended the request without all of its choices")
    return answer.whole([choices[index] for index in sorted(choices)], usage.usage())


async def _events(generation: Generation, answer: AnyAnswer) -> AsyncGenerator[bytes, None]:
    usage = generation.usage_counter()
    async with generation.running() as outputs:
        async for prompt_index, output in outputs:
            usage.add(prompt_index, output)
            answer.note_prompt(prompt_index, output)
            first_choice = prompt_index * generation.plan.n
            events = [
                encode_event(chunk)
                for choice in output.outputs
                for chunk in answer.chunks(first_choice + choice.index, choice, usage)
            ]
            if events:
                yield b"".join(events)
    if answer.report.at_end:
        yield encode_event(answer.usage_chunk(usage.usage()))
    yield DONE


def _without_tokens(choice: CompletionOutput) -> CompletionOutput:
    """The choice as if nothing had been generated: it ends by its length limit, which is 0."""
    reason = "length" if choice.finish_reason == "stop" else choice.finish_reason
    return CompletionOutput(choice.index, "", [], None, None, reason)


async def _merge(runs: list[Outputs]) -> Outputs:
    """Items of all runs as they come. A consumer that is slow holds every run back."""
    queue: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue(maxsize=1)

    async def pump(run: Outputs) -> None:
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
