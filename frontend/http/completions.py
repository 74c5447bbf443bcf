"""`POST /v1/completions`."""

import dataclasses

from fastapi import Response

from headrace.frontend.admission import RenderedPrompt
from headrace.frontend.http.answer import Answer, ChunkFrame
from headrace.frontend.http.call import Call
from headrace.frontend.http.fields import COMPLETION_FIELDS
from headrace.frontend.http.generation import respond
from headrace.frontend.http.prompts import parse_prompts
from headrace.frontend.http.protocol import CompletionBody
from headrace.frontend.http.responses import (
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
    CompletionResponse,
    Usage,
)
from headrace.frontend.http.sampling import (
    SamplingPlan,
    SamplingRules,
    ScoreRequest,
    make_sampling_plan,
)
from headrace.frontend.http.tokenizing import prompt_extras, tokenize_params
from headrace.frontend.outputs import CompletionOutput

DEFAULT_MAX_TOKENS = 16


async def create_completion(call: Call) -> Response:
    """Run a completion request; streams if the body says so."""
    body = await call.read(CompletionBody, COMPLETION_FIELDS)
    rules = call.rules()
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    plan = await call.compute(lambda: _plan(body, rules, max_tokens))
    given = await call.compute(
        lambda: parse_prompts(body.prompt, rules.config.vocab_size, rules.limits.max_prompts)
    )
    return await respond(
        call,
        body,
        plan,
        _render(call, body, given, max_tokens),
        lambda prompts: CompletionAnswer(call, body, plan, prompts),
    )


def _plan(body: CompletionBody, rules: SamplingRules, max_tokens: int) -> SamplingPlan:
    is_echo_alone = bool(body.echo) and max_tokens == 0
    return make_sampling_plan(
        body,
        rules,
        ScoreRequest(
            "logprobs",
            output=body.logprobs,
            prompt=None if body.stream else body.prompt_logprobs,
            echo=body.logprobs if body.echo else None,
        ),
        max_tokens=1 if is_echo_alone else max_tokens,
        keeps_output=not is_echo_alone,
    )


async def _render(
    call: Call, body: CompletionBody, given: list[str | list[int]], max_tokens: int
) -> list[RenderedPrompt]:
    renderer = call.state.engine.renderer
    params = dataclasses.replace(
        tokenize_params(body, renderer.default_cmpl_tok_params, call.config, max_tokens),
        add_special_tokens=body.add_special_tokens is not False,
        needs_detokenization=bool(body.echo),
    )
    prompts = [
        {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        for prompt in given
    ]
    return await renderer.render_cmpl_async(prompts, params, prompt_extras=prompt_extras(body))


class CompletionAnswer(Answer[CompletionChunkChoice]):
    """Writes completions and their chunks."""

    def __init__(
        self,
        call: Call,
        body: CompletionBody,
        plan: SamplingPlan,
        prompts: list[RenderedPrompt],
    ) -> None:
        super().__init__(call, body, plan, prompts)
        self._echoes = bool(body.echo)
        self._offsets: dict[int, int] = {}  # choice -> characters of its tokens so far

    def openings(self, choice: int) -> list[CompletionChunkChoice]:
        if not self._echoes:
            return []
        text, logprobs = self._echo_text(choice), self._echo_logprobs(choice)
        if not text and logprobs is None:
            return []
        self._offsets[choice] = _num_chars(logprobs)
        token_ids: list[int] | None = [] if self.returns_ids else None
        return [
            CompletionChunkChoice(
                choice, text, logprobs, None, None, self._prompt_ids_once(choice), token_ids
            )
        ]

    def delta(self, choice: int, output: CompletionOutput) -> CompletionChunkChoice:
        offset = self._offsets.get(choice, 0)
        logprobs = self._logprobs(output, offset)
        self._offsets[choice] = offset + _num_chars(logprobs)
        return CompletionChunkChoice(
            choice,
            output.text,
            logprobs,
            output.finish_reason,
            output.stop_reason,
            self._prompt_ids_once(choice),
            self.token_ids(output),
        )

    def chunk(self, choices: list[CompletionChunkChoice], frame: ChunkFrame) -> CompletionChunk:
        return CompletionChunk(
            self.id,
            self.created,
            self.model,
            choices,
            frame.usage,
            frame.fingerprint,
            effective_params=frame.effective_params,
            weight_version=frame.weight_version,
        )

    def whole(self, choices: list[CompletionOutput], usage: Usage) -> CompletionResponse:
        return CompletionResponse(
            self.id,
            self.created,
            self.model,
            [self._choice(index, output) for index, output in enumerate(choices)],
            self.fingerprint,
            usage,
            effective_params=self.effective,
            weight_version=self.weight_version,
        )

    def _choice(self, index: int, output: CompletionOutput) -> CompletionChoice:
        text = output.text
        logprobs: CompletionLogprobs | None = None
        if self._echoes:
            text = self._echo_text(index) + text
            logprobs = self._echo_logprobs(index)
        return CompletionChoice(
            index,
            text,
            _joined(logprobs, self._logprobs(output, _num_chars(logprobs))),
            output.finish_reason,
            output.stop_reason,
            token_ids=self.token_ids(output),
            prompt_logprobs=self.prompt_logprobs(index),
            prompt_token_ids=self.prompt_of(index).token_ids if self.returns_ids else None,
        )

    def _logprobs(self, output: CompletionOutput, offset: int) -> CompletionLogprobs | None:
        num_top = self.plan.num_logprobs
        if num_top is None or output.logprobs is None:
            return None
        return self.scores.completion(output.token_ids, output.logprobs, num_top, offset)

    def _echo_text(self, choice: int) -> str:
        """The prompt; nothing where the client gets it as ids."""
        return "" if self.returns_ids else self.prompt_of(choice).text or ""

    def _echo_logprobs(self, choice: int) -> CompletionLogprobs | None:
        scores, num_top = self.prompt_scores(choice), self.plan.num_echo_logprobs
        if scores is None or num_top is None:
            return None
        return self.scores.completion(self.prompt_of(choice).token_ids, scores, num_top)

    def _prompt_ids_once(self, choice: int) -> list[int] | None:
        if not (self.returns_ids and self.is_new(choice)):
            return None
        return self.prompt_of(choice).token_ids


def _num_chars(logprobs: CompletionLogprobs | None) -> int:
    return sum(map(len, logprobs.tokens)) if logprobs is not None else 0


def _joined(
    first: CompletionLogprobs | None, second: CompletionLogprobs | None
) -> CompletionLogprobs | None:
    if first is None or second is None:
        return first or second
    return CompletionLogprobs(
        first.text_offset + second.text_offset,
        first.token_logprobs + second.token_logprobs,
        first.tokens + second.tokens,
        first.top_logprobs + second.top_logprobs,
    )
