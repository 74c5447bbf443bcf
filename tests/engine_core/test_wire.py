"""Frames: both directions, epochs, versions; errors travel by code."""

import msgspec
import pytest

from headrace.configs.errors import (
    EngineDeadError,
    InvalidRequestError,
    RequestFailedError,
    error_from_code,
)
from headrace.configs.sampling_params import SamplingParams
from headrace.engine_core.messages import (
    ChoiceState,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineStats,
    Header,
)
from headrace.engine_core.wire import Codec
from headrace.workers.protocol import RequestFault, TokenLogprobs

REQUEST = EngineCoreRequest(
    "a-1", [1, 2, 3], SamplingParams(n=2, seed=2**64 - 1, stop_token_ids=[7], max_tokens=4),
    2, 1.5, [ChoiceState(0), ChoiceState(1, [9])], priority=-3, cache_salt="s",
)  # fmt: skip


def test_round_trip_to_core() -> None:
    codec = Codec(epoch=3)
    decoded = codec.decode_to_core(codec.encode(REQUEST))
    assert isinstance(decoded, EngineCoreRequest)
    assert decoded == REQUEST
    assert decoded.sampling_params.all_stop_token_ids == {7}


def test_round_trip_from_core() -> None:
    codec = Codec(epoch=3)
    output = EngineCoreOutput(
        "a-1", 1, 4, [5, 6], [TokenLogprobs([5], [-0.5], 1), TokenLogprobs([6], [-1.0], 2)],
        "error", fault=RequestFault("non_finite_logits", "x"),
    )  # fmt: skip
    message = EngineCoreOutputs([output], EngineStats(step=9))
    assert codec.decode_from_core(codec.encode(message)) == message


def test_frames_of_another_epoch_are_dropped() -> None:
    assert Codec(epoch=2).decode_to_core(Codec(epoch=1).encode(REQUEST)) is None


def test_another_version_is_an_error() -> None:
    frames = [msgspec.msgpack.encode(Header(99, 1)), b""]
    with pytest.raises(EngineDeadError, match="99"):
        Codec(epoch=1).decode_to_core(frames)


def test_errors_by_code() -> None:
    assert type(error_from_code("invalid_request", "m")) is InvalidRequestError
    assert type(error_from_code("engine_dead", "m")) is EngineDeadError
    assert type(error_from_code("something new", "m")) is RequestFailedError
