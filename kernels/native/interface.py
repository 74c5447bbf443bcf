"""The C interface in Python: the structs and numbers of `interface.h`, and the library's functions.

`interface.h` says what the fields mean.
"""

import ctypes
import enum
from pathlib import Path

INTERFACE_VERSION = 5
MAX_BUFFERS = 10
MAX_ROPES = 4
SHARD_LINE = 16  # words of a cache line
LIBRARY = Path(__file__).parent / "libheadrace_kernels.so"

_INT64_P = ctypes.POINTER(ctypes.c_int64)


class Kind(enum.IntEnum):
    NORM = 0
    NORM_ADD = 1
    PRODUCT = 2
    ATTENTION = 3
    SUM = 4
    MEET = 5


class Epilogue(enum.IntEnum):
    STORE = 0
    STORE_F32 = 1
    ADD = 2
    SILU_MUL = 3
    GELU_MUL = 4


class Lanes(enum.IntEnum):
    """Which rows of a packed matrix are filled: any, or those of a gate or an up projection."""

    PLAIN = 0
    GATE = 1
    UP = 2


class Format(enum.IntEnum):
    """Of numbers: rows have one of the first three, packed matrices any."""

    BF16 = 0
    F16 = 1
    F32 = 2
    INT8 = 3
    Q8_0 = 4
    Q4_0 = 5
    Q4_1 = 6
    Q5_0 = 7
    Q5_1 = 8
    Q4_K = 9
    Q5_K = 10
    Q6_K = 11


class Op(ctypes.Structure):
    """One operation of a step: `hr_op`. Pointers are addresses; 0 is null."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("epilogue", ctypes.c_int32),
        ("input", ctypes.c_int32),
        ("output", ctypes.c_int32),
        ("normed", ctypes.c_int32),
        ("rope", ctypes.c_int32),
        ("weight", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_outputs", ctypes.c_int64),
        ("num_inputs", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        ("group", ctypes.c_int32),
        ("pages", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("cache_format", ctypes.c_int32),
        ("is_input_kept", ctypes.c_int32),
        ("output_column", ctypes.c_int64),
    )


class Group(ctypes.Structure):
    """One KV group of a step: `hr_group`."""

    _fields_ = (("slots", ctypes.c_void_p), ("window", ctypes.c_int64))


class Step(ctypes.Structure):
    """What changes from step to step: `hr_step`."""

    _fields_ = (
        ("num_tokens", ctypes.c_int64),
        ("num_sequences", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("num_groups", ctypes.c_int64),
        ("query_starts", ctypes.c_void_p),
        ("context_lens", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("groups", ctypes.POINTER(Group)),
        ("buffers", ctypes.c_void_p * MAX_BUFFERS),
        ("strides", ctypes.c_int64 * MAX_BUFFERS),
        ("ropes", ctypes.c_void_p * MAX_ROPES),
        ("op_seconds", ctypes.c_void_p),
        ("format", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class Shards(ctypes.Structure):
    """The workers that divide a model's layers: `hr_shards`."""

    _fields_ = (
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("arrivals", ctypes.c_void_p),
        ("meetings", ctypes.c_void_p),
        ("parts", ctypes.c_void_p),
    )


class DrawRow(ctypes.Structure):
    """How one row of logits is drawn from: `hr_draw_row`."""

    _fields_ = (
        ("row", ctypes.c_int64),
        ("best", ctypes.c_int64),
        ("top_p", ctypes.c_double),
        ("seed", ctypes.c_uint64),
        ("top_k", ctypes.c_int64),
        ("min_score", ctypes.c_float),
        ("choice_index", ctypes.c_uint32),
        ("output_index", ctypes.c_uint32),
        ("temperature", ctypes.c_float),
    )


def open_library(path: Path = LIBRARY) -> ctypes.CDLL:
    """The library with its functions declared.

    Calls release the GIL. Raises OSError if it is missing, cannot be loaded, or belongs to another
    version of this file.
    """
    library = ctypes.CDLL(str(path))
    int32, int64, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
    signatures: dict[str, tuple[object, tuple[object, ...]]] = {
        "hr_interface_version": (int32, ()),
        "hr_op_bytes": (int64, ()),
        "hr_group_bytes": (int64, ()),
        "hr_step_bytes": (int64, ()),
        "hr_draw_row_bytes": (int64, ()),
        "hr_machine": (int32, ()),
        "hr_why_not": (ctypes.c_char_p, (int32,)),
        "hr_pool_new": (pointer, (int32, pointer)),
        "hr_pool_free": (None, (pointer,)),
        "hr_run": (int32, (pointer, int32, ctypes.POINTER(Op), int64, ctypes.POINTER(Step))),
        "hr_packed_bytes": (int64, (int32, int64, int64)),
        "hr_pack": (
            int32,
            (pointer, pointer, int32, int64, int64, pointer, int32, int64, int32),
        ),
        "hr_lookup": (
            int32,
            (pointer, pointer, int32, int64, pointer, int64, ctypes.c_float, int32, pointer),
        ),
        "hr_argmax": (int32, (pointer, int32, pointer, int64, int64, pointer, pointer)),
        "hr_draw": (
            int32,
            (pointer, int32, pointer, int64, ctypes.POINTER(DrawRow), int64, pointer, pointer),
        ),
        "hr_score": (
            None,
            (pointer, int32, pointer, int64, pointer, int64, pointer, pointer, pointer, int64)
            + 3 * (pointer,),
        ),
        "hr_peak": (ctypes.c_double, (pointer, int32, int32, int64)),
    }
    try:
        for name, (result, arguments) in signatures.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except AttributeError as error:
        raise OSError(f"{path} is not of this version: {error}") from error
    sizes = (
        library.hr_op_bytes(),
        library.hr_group_bytes(),
        library.hr_step_bytes(),
        library.hr_draw_row_bytes(),
    )
    expected = tuple(ctypes.sizeof(struct) for struct in (Op, Group, Step, DrawRow))
    if library.hr_interface_version() != INTERFACE_VERSION or sizes != expected:
        raise OSError(f"{path} is not of this version")
    return library
