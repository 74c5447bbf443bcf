"""Runs one step: applies what changed, runs the model over the flat token batch, samples."""

import math
from collections import deque

import torch

from headrace.configs.config import LogprobsMode
from headrace.configs.errors import HeadraceError, NonFiniteLogitsError, RequestFailedError
from headrace.workers.argmax import argmax_rows
from headrace.workers.distributed import Place
from headrace.workers.distributed.groups import WorkerGroups
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

ALONE_HERE = WorkerGroups(Place())


class ModelRunner:
    """Owns the request table and drives the model, or this worker's part of it.

    Of several workers, the first shard of the last stage samples, and the others learn the tokens:
    the shards beside it at once, other stages by the time of a step that the scheduler has made
    knowing them.

    Three fences keep a fault with its choice: around the preparation of each choice, the scores of
    its prompt, and the sampling of each row. A failure of the forward pass itself concerns the
    whole batch and is raised.
    """

    def __init__(
        self,
        model: Decoder,
        kv_cache: KVCache,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        groups: WorkerGroups = ALONE_HERE,
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self._groups = groups
        # Steps whose sampled tokens are still to come from the last stage.
        self._unknown: deque[tuple[int, list[KnownChoice]]] = deque()
        self._logprobs_mode: LogprobsMode = logprobs_mode
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

    def replace_model(self, model: Decoder) -> None:
        """Run another model of the same shape from the next step on."""
        self.model = model
        self.sampler = Sampler(self._logprobs_mode, model.kernels)
        self._planners = model.planners(self.kv_cache.spec)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step and append the sampled tokens to the table.

        A choice in `failed` got no token; its state stays until the scheduler says that it is
        finished.
        """
        self._take_tokens(step.last_result)
        self.table.forget(step.finished)
        if step.blocks_to_zero:
            self.kv_cache.zero_blocks(step.blocks_to_zero)
        if step.block_copies:
            self.kv_cache.copy_blocks(step.block_copies)
        output = ModelRunnerOutput(step.step, {}, {}, {})
        states = self._prepare(step, output.failed)
        if states:
            self._run(step.step, states, output)
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

    def _run(self, step: int, states: list[KnownChoice], output: ModelRunnerOutput) -> None:
        batch = make_input_batch(states, self._planners)
        place, stages = self._groups.place, self._groups.stages
        if place.is_first_stage:
            entering = self.model.embed(batch.token_ids)
        else:
            assert stages is not None
            shape = (len(batch.token_ids), self.model.config.hidden_size)
            entering = stages.receive_residual(shape, self.model.dtype)
        residual = self.model(entering, batch.positions, self.kv_cache, batch.attention)
        if not place.is_last_stage:
            assert stages is not None
            stages.send_residual(residual)
            if batch.sampled:
                self._unknown.append((step, batch.sampled))
            return
        self._score_prompts(batch, residual, output)
        if batch.sampled:
            self._sample_batch(batch, residual, output)

    def _take_tokens(self, last_result: int) -> None:
        """The tokens that other stages have sampled, up to the step `last_result`."""
        while self._unknown and self._unknown[0][0] <= last_result:
            _, states = self._unknown.popleft()
            assert self._groups.stages is not None
            self._append(states, self._groups.stages.receive_tokens(len(states)).tolist())

    def _score_prompts(
        self, batch: InputBatch, residual: torch.Tensor, output: ModelRunnerOutput
    ) -> None:
        """A few rows at a time, since a row of scores is as wide as the vocabulary.

        All shards make all logits, whatever the one that scores them finds.
        """
        for scored in batch.scored:
            choice_id = scored.state.choice_id
            entries: list[TokenLogprobs] = []
            hidden = residual[scored.rows].split(SCORE_ROWS)
            for rows, token_ids in zip(hidden, scored.token_ids.split(SCORE_ROWS), strict=True):
                logits = self.model.compute_logits(rows)
                if not self._groups.place.samples or choice_id in output.failed:
                    continue
                try:
                    entries += self._scores(scored, logits, token_ids, len(entries))
                except Exception as error:
                    output.failed[choice_id] = _fault(error)
            if choice_id not in output.failed:
                output.prompt_logprobs[choice_id] = entries
                scored.state.num_scored += len(scored.positions)

    def _scores(
        self, scored: ScoredRows, logits: torch.Tensor, token_ids: torch.Tensor, num_before: int
    ) -> list[TokenLogprobs]:
        maxima, _ = argmax_rows(logits, self.model.kernels)
        if not all(map(math.isfinite, maxima)):
            raise NonFiniteLogitsError(
                "the model produced NaN or infinite logits for the prompt, before token "
                f"{scored.positions.start + num_before + len(logits)}"
            )
        num_top = scored.state.params.prompt_logprobs or 0
        return score_rows(
            logits, range(len(maxima)), token_ids.tolist(), [num_top] * len(maxima), maxima,
            self._prompt_mode, self.model.kernels,
        )  # fmt: skip

    def _sample_batch(
        self, batch: InputBatch, residual: torch.Tensor, output: ModelRunnerOutput
    ) -> None:
        logits = self.model.compute_logits(residual[batch.sampled_rows])
        token_ids = [-1] * len(batch.sampled)
        if self._groups.place.samples:
            rows = self._sample(logits, batch.sampled)
            for i, (state, row) in enumerate(zip(batch.sampled, rows, strict=True)):
                if state.choice_id in output.failed:
                    continue
                if row.fault is not None:
                    output.failed[state.choice_id] = row.fault
                    continue
                token_ids[i] = row.token_id
                logprobs = None if row.logprobs is None else [row.logprobs]
                output.sampled[state.choice_id] = SampledTokens([row.token_id], logprobs)
        if self._groups.world.size > 1:
            token_ids = self._share_tokens(token_ids)
        self._append(batch.sampled, token_ids)

    def _share_tokens(self, token_ids: list[int]) -> list[int]:
        """What the first shard has sampled (-1: nothing), which all others learn."""
        shared = torch.tensor(token_ids)
        self._groups.shards.broadcast(shared, 0)
        if self._groups.stages is not None:
            self._groups.stages.send_tokens(shared)
        return shared.tolist()

    def _append(self, states: list[KnownChoice], token_ids: list[int]) -> None:
        for state, token_id in zip(states, token_ids, strict=True):
            if token_id >= 0:
                state.append(token_id)

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
