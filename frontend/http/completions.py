"""`POST /v1/completions`."""

from collections.abc import Iterator

from fastapi import Response
from msgspec import UNSET, UnsetType

from headrace.frontend.admission import RenderedPrompt
from headrace.frontend.http.call import Call
from headrace.frontend.http.fields import COMPLETION_FIELDS
from headrace.frontend.http.generation import UsageCounter, UsageReport, respond
from headrace.frontend.http.logprobs import LogprobFormat
from headrace.frontend.http.prompts import parse_prompts
from headrace.frontend.http.protocol import CompletionBody
from headrace.frontend.http.responses import (
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionResponse,
    Usage,
)
from headrace.frontend.http.sampling import make_sampling_params
from headrace.frontend.outputs import CompletionOutput

DEFAULT_MAX_TOKENS = 16


async def create_completion(call: Call) -> Response:
    """Run a completion request; streams if the body says so."""
    body = await call.read(CompletionBody, COMPLETION_FIELDS)
    config = call.config
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    params = make_sampling_params(
        body, config, max_tokens=max_tokens, logprobs=body.logprobs, logprobs_field="logprobs"
    )
    given = parse_prompts(body.prompt, config.vocab_size)
    return await respond(
        call,
        body,
        params,
        _render(call, given, body.add_special_tokens is not False),
        lambda prompts: CompletionFormat(call, body, prompts, params.n),
    )


async def _render(
    call: Call, given: list[str | list[int]], add_special_tokens: bool
) -> list[RenderedPrompt]:
    renderer = call.state.engine.renderer
    prompts = [await renderer.render_completion(prompt, add_special_tokens) for prompt in given]
    call.warnings += [warning for prompt in prompts for warning in prompt.warnings]
    return prompts


class CompletionFormat:
    """Writes completions and their chunks."""

    def __init__(
        self, call: Call, body: CompletionBody, prompts: list[RenderedPrompt], n: int
    ) -> None:
        self._id = call.response_id
        self._created = call.created
        self._model = call.config.served_model_name
        self._fingerprint = call.fingerprint
        self._prompts = prompts
        self._n = n
        self._logprobs = LogprobFormat(
            call.state.engine.tokenizer, bool(body.return_tokens_as_token_ids)
        )
        self._returns_ids = bool(body.return_token_ids)
        self._report = UsageReport(body.stream_options)
        self._offsets: dict[int, int] = {}  # choice -> characters of its tokens so far

    def chunks(
        self, choice: int, output: CompletionOutput, usage: UsageCounter
    ) -> Iterator[CompletionChunk]:
        is_first = choice not in self._offsets
        offset = self._offsets.setdefault(choice, 0)
        logprobs = self._logprobs.completion(output, offset)
        if logprobs is not None:
            self._offsets[choice] += sum(map(len, logprobs.tokens))
        has_tokens = bool(output.token_ids) and (logprobs is not None or self._returns_ids)
        if not (output.text or output.finish_reason or has_tokens):
            return  # the text is held back for now
        prompt_ids = self._prompts[choice // self._n].token_ids
        yield self._chunk(
            [
                CompletionChunkChoice(
                    choice,
                    output.text,
                    logprobs,
                    output.finish_reason,
                    output.stop_reason,
                    prompt_ids if self._returns_ids and is_first else None,
                    list(output.token_ids) if self._returns_ids else None,
                )
            ],
            self._report.in_chunk(usage),
            is_last=output.finish_reason is not None and not self._report.at_end,
        )

    def usage_chunk(self, usage: Usage) -> CompletionChunk:
        return self._chunk([], usage, is_last=True)

    def _chunk(
        self,
        choices: list[CompletionChunkChoice],
        usage: Usage | UnsetType | None,
        *,
        is_last: bool,
    ) -> CompletionChunk:
        return CompletionChunk(
            self._id,
            self._created,
            self._model,
            choices,
            usage,
            self._fingerprint if is_last else UNSET,
        )

    def whole(self, choices: list[CompletionOutput], usage: Usage) -> CompletionResponse:
        return CompletionResponse(
            self._id,
            self._created,
            self._model,
            [self._choice(index, output) for index, output in enumerate(choices)],
            self._fingerprint,
            usage,
        )

    def _choice(self, index: int, output: CompletionOutput) -> CompletionChoice:
        prompt = self._prompts[index // self._n]
        return CompletionChoice(
            index,
            output.text,
            self._logprobs.completion(output, 0),
            output.finish_reason,
            output.stop_reason,
            token_ids=list(output.token_ids) if self._returns_ids else None,
            prompt_token_ids=prompt.token_ids if self._returns_ids else None,
        )
