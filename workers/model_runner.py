"""Runs one step: applies what changed, runs the model over the flat token batch, samples."""

import math

import torch

from headrace.configs.config import LogprobsMode
from headrace.configs.errors import HeadraceError, NonFiniteLogitsError, RequestFailedError
from headrace.workers.argmax import argmax_rows
from headrace.workers.input_batch import (
    InputBatch,
    KnownChoice,
    RequestTable,
    ScoredRows,
    make_input_batch,
    sampling_row,
)
from headrace.workers.kv_cache import KVCache
from headrace.workers.logprobs import SCORE_ROWS, score_rows
from headrace.workers.models import Decoder
from headrace.workers.protocol import (
    CachedRequestData,
    ChoiceId,
    ModelRunnerOutput,
    NewRequestData,
    RequestFault,
    SampledTokens,
    SchedulerOutput,
    TokenLogprobs,
)
from headrace.workers.sampler import SampledRow, Sampler


class ModelRunner:
    """Owns the request table and drives the model.

    Three fences keep a fault with its choice: around the preparation of each choice, the scores of
    its prompt, and the sampling of each row. A failure of the forward pass itself concerns the
    whole batch and is raised.
    """

    def __init__(
        self, model: Decoder, kv_cache: KVCache, logprobs_mode: LogprobsMode = "raw_logprobs"
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.sampler = Sampler(logprobs_mode, model.kernels)
        self._prompt_mode: LogprobsMode = (
            "raw_logits" if logprobs_mode.endswith("logits") else "raw_logprobs"
        )
        spec = kv_cache.spec
        self.table = RequestTable(
            block_size=spec.block_size,
            num_groups=len(spec.groups),
            num_blocks=kv_cache.num_blocks,
            vocab_size=model.config.vocab_size,
            max_model_len=model.max_model_len,
        )
        self._planners = model.planners(spec)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step and append the sampled tokens to the table.

        A choice in `failed` got no token; its state stays until the scheduler says that it is
        finished.
        """
        self.table.forget(step.finished)
        if step.blocks_to_zero:
            self.kv_cache.zero_blocks(step.blocks_to_zero)
        if step.block_copies:
            self.kv_cache.copy_blocks(step.block_copies)
        output = ModelRunnerOutput(step.step, {}, {}, {})
        states = self._prepare(step, output.failed)
        if states:
            self._run(states, output)
        return output

    def _prepare(
        self, step: SchedulerOutput, failed: dict[ChoiceId, RequestFault]
    ) -> list[KnownChoice]:
        states = []
        changes: list[NewRequestData | CachedRequestData] = []
        changes += step.new_requests
        changes += step.cached_requests
        for change in changes:
            choice_id = change.choice_id
            try:
                known = self.table.apply(change)
                self.table.schedule(known, step.num_scheduled_tokens[choice_id])
            except Exception as error:
                failed[choice_id] = _fault(error)
            else:
                states.append(known)
        return states

    def _run(self, states: list[KnownChoice], output: ModelRunnerOutput) -> None:
        batch = make_input_batch(states, self._planners)
        embedded = self.model.embed(batch.token_ids)
        residual = self.model(embedded, batch.positions, self.kv_cache, batch.attention)
        self._score_prompts(batch, residual, output)
        if batch.sampled:
            self._sample_batch(batch, residual, output)

    def _score_prompts(
        self, batch: InputBatch, residual: torch.Tensor, output: ModelRunnerOutput
    ) -> None:
        for scored in batch.scored:
            choice_id = scored.state.choice_id
            try:
                output.prompt_logprobs[choice_id] = self._prompt_logprobs(scored, residual)
            except Exception as error:
                output.failed[choice_id] = _fault(error)
            else:
                scored.state.num_scored += len(scored.positions)

    def _prompt_logprobs(self, scored: ScoredRows, residual: torch.Tensor) -> list[TokenLogprobs]:
        """A few rows at a time, since a row of scores is as wide as the vocabulary."""
        entries: list[TokenLogprobs] = []
        num_top = scored.state.params.prompt_logprobs or 0
        hidden = residual[scored.rows].split(SCORE_ROWS)
        for rows, token_ids in zip(hidden, scored.token_ids.split(SCORE_ROWS), strict=True):
            logits = self.model.compute_logits(rows)
            maxima, _ = argmax_rows(logits, self.model.kernels)
            if not all(map(math.isfinite, maxima)):
                raise NonFiniteLogitsError(
                    "the model produced NaN or infinite logits for the prompt, before token "
                    f"{scored.positions.start + len(entries) + len(rows)}"
                )
            numbers = range(len(maxima))
            entries += score_rows(
                logits, numbers, token_ids.tolist(), [num_top] * len(maxima), maxima,
                self._prompt_mode, self.model.kernels,
            )  # fmt: skip
        return entries

    def _sample_batch(
        self, batch: InputBatch, residual: torch.Tensor, output: ModelRunnerOutput
    ) -> None:
        logits = self.model.compute_logits(residual[batch.sampled_rows])
        for state, row in zip(batch.sampled, self._sample(logits, batch.sampled), strict=True):
            if state.choice_id in output.failed:
                continue
            if row.fault is not None:
                output.failed[state.choice_id] = row.fault
                continue
            state.append(row.token_id)
            logprobs = None if row.logprobs is None else [row.logprobs]
            output.sampled[state.choice_id] = SampledTokens([row.token_id], logprobs)

    def _sample(self, logits: torch.Tensor, states: list[KnownChoice]) -> list[SampledRow]:
        try:
            return self.sampler.sample(logits, [sampling_row(state) for state in states])
        except Exception:
            # One row's fault must not end the others: find it by sampling them one by one.
            return [self._sample_alone(logits[i], state) for i, state in enumerate(states)]

    def _sample_alone(self, logits: torch.Tensor, state: KnownChoice) -> SampledRow:
        try:
            return self.sampler.sample(logits[None], [sampling_row(state)])[0]
        except Exception as error:
            return SampledRow(-1, fault=_fault(error))


def _fault(error: Exception) -> RequestFault:
    """The fault of one choice; messages of errors that are not ours carry their type, too."""
    if isinstance(error, HeadraceError):
        return RequestFault(error.code, str(error))
    return RequestFault(RequestFailedError.code, f"{type(error).__name__}: {error}")
