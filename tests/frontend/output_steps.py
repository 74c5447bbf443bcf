"""Factories for output-processor tests: a tokenizer that is a list of bytes, messages, requests."""

from headrace.configs.sampling_params import RequestOutputKind, SamplingParams
from headrace.engine_core.messages import (
    ChoiceState,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineStats,
)
from headrace.frontend.output_processor import OutputProcessor, ProcessedStep
from headrace.frontend.outputs import RequestOutput


class ByteTable:
    """A tokenizer that is a list of byte strings; the last id is a special end token."""

    strips_leading_space = False

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = [*pieces, b"<end>"]
        self.eos = len(pieces)

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id == self.eos


def step(outputs: list[EngineCoreOutput], now: float = 0.0) -> EngineCoreOutputs:
    """A message with `outputs`; `now` 0: without a time."""
    return EngineCoreOutputs(outputs, EngineStats(), now)


class OneRequest:
    """A processor that follows request "r", whose prompt is "prompt" with ids 1, 2, 3."""

    def __init__(
        self,
        params: SamplingParams,
        kind: RequestOutputKind | None = None,
        pieces: tuple[bytes, ...] = (b"a", b"b", b"c"),
        arrival_time: float = 100.0,
    ) -> None:
        self.processor = OutputProcessor(ByteTable(list(pieces)))
        choices = [ChoiceState(index) for index in range(params.n)]
        request = EngineCoreRequest("r", [1, 2, 3], params, None, arrival_time, choices)
        self.processor.add(request, "label", "prompt", params.output_kind if kind is None else kind)

    def step(self, *outputs: EngineCoreOutput, now: float = 101.0) -> ProcessedStep:
        return self.processor.process(step(list(outputs), now))

    def output(self, *outputs: EngineCoreOutput, now: float = 101.0) -> RequestOutput | None:
        result = self.step(*outputs, now=now).results["r"]
        assert result.failure is None
        return result.output
