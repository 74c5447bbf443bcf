"""Calls to workers: what travels as msgpack, what as cloudpickle, and what a server refuses."""

import threading
from collections import OrderedDict
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.configs.errors import (
    InvalidRequestError,
    RequestFailedError,
    UnsupportedFeatureError,
)
from headrace.executors.worker_calls import (
    decode_call,
    decode_results,
    encode_call,
    encode_error,
    encode_result,
    is_plain,
)
from headrace.workers.protocol import WorkerCall, WorkerResult

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary()
values = st.recursive(
    scalars
    | st.floats(allow_nan=False, allow_subnormal=False)
    | st.tuples(scalars)
    | st.sets(st.integers(0, 9)),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(0, 9), inner),
    max_leaves=8,
)


def over_the_wire(message: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))


@given(values)
def test_every_value_arrives_as_it_was(value: Any) -> None:
    result = over_the_wire(encode_result(value, allows_callables=True))
    (arrived,) = decode_results([result])
    assert arrived == value and type(arrived) is type(value)
    assert (result.pickled is None) is is_plain(value)


def test_what_msgpack_cannot_hold_arrives_all_the_same() -> None:
    """An exception in the engine core's I/O thread would end it, and every request with it."""
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    for value in ("\ud800", ["\udc80"], {"\ud800": 1}, deep):
        result = over_the_wire(encode_result(value, allows_callables=True))
        assert decode_results([result]) == [value]
        refused = over_the_wire(encode_result(value, allows_callables=False))
        assert refused.fault is not None
    named = over_the_wire(encode_call(1, "\ud800", (), None))
    assert decode_call(named, allows_callables=True)[0] == "\ud800"
    error = over_the_wire(encode_error(ValueError("\ud800é"), 0, allows_callables=False))
    with pytest.raises(RequestFailedError, match=r"ValueError: \\ud800é"):
        decode_results([error])


def test_plain_calls_carry_no_pickle() -> None:
    call = over_the_wire(encode_call(3, "method", [1, "a", [2.0]], {"k": b"x"}))
    assert call == WorkerCall(3, "method", [1, "a", [2.0]], {"k": b"x"}, None)
    assert decode_call(call, allows_callables=False) == ("method", [1, "a", [2.0]], {"k": b"x"})


def test_callables_and_arguments_that_msgpack_changes() -> None:
    offset = 10
    call = over_the_wire(encode_call(1, lambda worker, x: worker + x + offset, (1,), None))
    method, args, kwargs = decode_call(call, allows_callables=True)
    assert callable(method)
    assert method(100, *args, **kwargs) == 111
    named = over_the_wire(encode_call(1, "method", ((1, 2),), {"o": OrderedDict(a=1)}))
    assert decode_call(named, True) == ("method", ((1, 2),), {"o": OrderedDict(a=1)})


def test_a_server_takes_no_pickle() -> None:
    with pytest.raises(UnsupportedFeatureError, match="no callables"):
        decode_call(encode_call(1, lambda worker: None, (), None), allows_callables=False)
    refused = encode_result((1, 2), allows_callables=False)
    assert refused.pickled is None and refused.fault is not None
    error = encode_error(ValueError("why"), 0, allows_callables=False)
    assert error.pickled_error is None
    with pytest.raises(RequestFailedError, match="worker 0: ValueError: why"):
        decode_results([error])


def test_what_cannot_be_sent_is_an_error_of_the_call() -> None:
    with pytest.raises(InvalidRequestError, match="lock"):
        encode_call(1, "method", (threading.Lock(),), None)
    with pytest.raises(InvalidRequestError, match="int"):
        encode_call(1, 3, (), None)  # type: ignore[arg-type]
    with pytest.raises(RequestFailedError, match=r"lock.*cannot be sent back"):
        decode_results([encode_result(threading.Lock(), allows_callables=True)])


class NeedsTwo(Exception):
    """Can be pickled but not read: its constructor takes two arguments."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} {b}")


def test_exceptions_keep_their_type_and_name_the_worker() -> None:
    def fails() -> None:
        raise KeyError("which")

    try:
        fails()
    except KeyError as caught:
        error = over_the_wire(encode_error(caught, 1, allows_callables=True))
    with pytest.raises(KeyError, match="which") as raised:
        decode_results([WorkerResult(5), error])
    (note,) = raised.value.__notes__
    assert note.startswith("raised by worker 1:") and "in fails" in note
    with pytest.raises(RequestFailedError, match="worker 0: NeedsTwo: 1 2"):
        decode_results([encode_error(NeedsTwo(1, 2), 0, allows_callables=True)])
