"""What `collective_rpc` sends to workers and gets back: msgpack, or cloudpickle.

The one place that reads and writes cloudpickle (rule S1): for callables, and for values that
msgpack would change, on the private Unix socket between a program and the engine core that this
program itself has started. A server's engine core refuses it.
"""

import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from headrace.configs.errors import (
    HeadraceError,
    InvalidRequestError,
    RequestFailedError,
    UnsupportedFeatureError,
    error_from_code,
)
from headrace.workers.protocol import RequestFault, WorkerCall, WorkerResult

Method = str | Callable[..., Any]
# Methods that leave the worker as they found it. Of every other call nobody knows.
READING_METHODS = frozenset(
    {
        "start_profile", "stop_profile", "start_op_profile", "stop_op_profile", "reload_weights",
    }
)  # fmt: skip
MAX_PLAIN_DEPTH = 64  # of nested lists and dicts; what is deeper is pickled


def encode_call(
    call_id: int, method: Method, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> WorkerCall:
    """The message for a method name or a callable, which gets the worker as its first argument.

    Raises InvalidRequestError for something that cannot be pickled.
    """
    arguments, options = list(args), dict(kwargs or {})
    if isinstance(method, str) and all(map(is_plain, (method, arguments, options))):
        return WorkerCall(call_id, method, list(arguments), options)
    if not isinstance(method, str) and not callable(method):
        raise InvalidRequestError(
            f"method must be a name or a callable, got {type(method).__name__}", "method"
        )
    try:
        pickled = cloudpickle.dumps((method, tuple(arguments), options))
    except Exception as error:
        raise InvalidRequestError(
            f"the call cannot be sent to the workers: {type(error).__name__}: {error}", "method"
        ) from error
    return WorkerCall(call_id, None, pickled=pickled)


def only_reads(call: WorkerCall) -> bool:
    """Whether the workers are after the call what their configuration says."""
    return call.method in READING_METHODS


def has_failed(result: WorkerResult) -> bool:
    """Whether a worker's call raised."""
    return result.fault is not None or result.pickled_error is not None


def decode_call(
    call: WorkerCall, allows_callables: bool
) -> tuple[Method, Sequence[Any], Mapping[str, Any]]:
    """Method or callable, arguments and keyword arguments of a message."""
    if call.pickled is None:
        return call.method or "", call.args, call.kwargs
    if not allows_callables:
        raise UnsupportedFeatureError(
            "a server, or a replica on another machine, takes method names with plain arguments, "
            "no callables",
            "method",
        )
    method, args, kwargs = pickle.loads(call.pickled)
    return method, args, kwargs


def encode_result(value: Any, allows_callables: bool) -> WorkerResult:
    """A worker's return value; a fault if it cannot be sent."""
    if is_plain(value):
        return WorkerResult(value)
    if not allows_callables:
        return _fault(f"a value of type {type(value).__name__} is not sent by a server")
    try:
        return WorkerResult(pickled=cloudpickle.dumps(value))
    except Exception as error:
        return _fault(
            f"the result, a {type(value).__name__}, cannot be sent back: "
            f"{type(error).__name__}: {error}"
        )


def encode_error(error: BaseException, rank: int, allows_callables: bool) -> WorkerResult:
    """An exception of the worker `rank`, with its traceback as a note."""
    lines = "".join(traceback.format_exception(error)).rstrip()
    text = f"worker {rank}: {type(error).__name__}: {error}"
    if allows_callables and isinstance(error, Exception):
        try:
            error.add_note(f"raised by worker {rank}:\n{lines}")
            pickled = cloudpickle.dumps(error.with_traceback(None))
            pickle.loads(pickled)  # some classes can be written but not read
            return WorkerResult(pickled_error=pickled)
        except Exception:
            return _fault(f"{text}\n{lines}")
    if isinstance(error, HeadraceError):
        return WorkerResult(fault=RequestFault(error.code, f"worker {rank}: {error}"))
    return _fault(text)


def decode_results(results: Sequence[WorkerResult]) -> list[Any]:
    """The values by rank. Raises the exception of the first worker that failed."""
    values = []
    for result in results:
        if result.fault is not None:
            raise error_from_code(result.fault.code, result.fault.message)
        if result.pickled_error is not None:
            error = _read(result.pickled_error)
            raise error if isinstance(error, Exception) else RequestFailedError(str(error))
        values.append(result.value if result.pickled is None else _read(result.pickled))
    return values


def is_plain(value: Any, depth: int = MAX_PLAIN_DEPTH) -> bool:
    """Whether msgpack gives the value back exactly as it is (it makes lists of tuples).

    Not if lists and dicts are nested more than `depth` deep.
    """
    kind = type(value)
    if kind is int:
        return -(2**63) <= int(value) < 2**64
    if kind is str:
        return _is_text(value)
    if kind is list:
        return depth > 0 and all(is_plain(item, depth - 1) for item in value)
    if kind is dict:
        return depth > 0 and all(
            type(key) is str and _is_text(key) and is_plain(item, depth - 1)
            for key, item in value.items()
        )
    return value is None or kind in (bool, float, bytes)


def _is_text(value: str) -> bool:
    """Whether a str has no surrogates, which UTF-8 cannot hold."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read(pickled: bytes) -> Any:
    try:
        return pickle.loads(pickled)
    except Exception as error:
        raise RequestFailedError(
            f"a worker's answer cannot be read here: {type(error).__name__}: {error}"
        ) from error


def _fault(message: str) -> WorkerResult:
    return WorkerResult(fault=RequestFault("request_failed", message))
