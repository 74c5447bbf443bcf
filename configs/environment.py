"""Every `HEADRACE_*` environment variable, in one registry; an unknown one is an error."""

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.configs.errors import ConfigurationError

PREFIX = "HEADRACE_"
# Kubernetes puts variables like HEADRACE_SERVICE_HOST and HEADRACE_PORT_8000_TCP_ADDR into the pods
# beside a service named "headrace"; they are not ours.
_KUBERNETES = re.compile(r"HEADRACE_(?:.*_)?(?:SERVICE_(?:HOST|PORT.*)|PORT(?:_.*)?)")


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, the value when unset, and what it does."""

    name: str
    default: str
    help: str


MULTIPROCESSING = Variable(
    "HEADRACE_MULTIPROCESSING", "1", "0 runs the engine core in the caller's process, for debugging"
)
CACHE = Variable(
    "HEADRACE_CACHE", "", "folder for pulled models and tokenizers (default: ~/.cache/headrace)"
)
API_KEY = Variable("HEADRACE_API_KEY", "", "API key of `headrace serve` when --api-key is absent")
LOG_STATS_INTERVAL = Variable(
    "HEADRACE_LOG_STATS_INTERVAL", "10", "seconds between two statistics lines of the log"
)
LOGGING_LEVEL = Variable(
    "HEADRACE_LOGGING_LEVEL",
    "",
    "least level that commands log: debug, info, warning, error or critical, unless --log-level "
    "says it (default: info for serve, else warning)",
)
ALLOW_LONG_MAX_MODEL_LEN = Variable(
    "HEADRACE_ALLOW_LONG_MAX_MODEL_LEN",
    "0",
    "1 allows --max-model-len above what the model was trained for",
)
CPU_KERNELS = Variable(
    "HEADRACE_CPU_KERNELS",
    "auto",
    "kernels on CPUs: auto, reference (torch), avx2, avx512, avx512vnni, avx512bf16 or amx; on "
    "64-bit Arm neon or neondotprod",
)
CPU_PINNING = Variable(
    "HEADRACE_CPU_PINNING",
    "none",
    "where the threads of the CPU kernels, but for the first, stay: none (anywhere), auto (a core "
    "each, if there are as many as threads) or CPUs like 1-3,6; for machines that do nothing else",
)
RAY_EXTRA_ENV_VARS = Variable(
    "HEADRACE_RAY_EXTRA_ENV_VARS_TO_COPY",
    "",
    "names of further environment variables that Ray's workers get, as A,B; they get those of "
    "headrace, Hugging Face, Gloo, NCCL and OpenMP anyway",
)
VARIABLES = (
    MULTIPROCESSING,
    CACHE,
    API_KEY,
    LOGGING_LEVEL,
    LOG_STATS_INTERVAL,
    ALLOW_LONG_MAX_MODEL_LEN,
    CPU_KERNELS,
    CPU_PINNING,
    RAY_EXTRA_ENV_VARS,
)
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


def read(variable: Variable, environ: Mapping[str, str]) -> str:
    """The variable's value in `environ`, or its default."""
    return environ.get(variable.name, variable.default)


def read_number(variable: Variable, environ: Mapping[str, str]) -> float:
    """The variable's value as a number above 0. Raises ConfigurationError if it is not one."""
    text = read(variable, environ) or variable.default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ConfigurationError(f"{variable.name} must be a number above 0, got {text!r}")
    return number


def read_switch(variable: Variable, environ: Mapping[str, str]) -> bool:
    """Whether the variable is 1. Raises ConfigurationError if it is neither 0 nor 1."""
    text = read(variable, environ) or variable.default
    if text not in ("0", "1"):
        raise ConfigurationError(f"{variable.name} must be 0 or 1, got {text!r}")
    return text == "1"


def read_log_level(environ: Mapping[str, str]) -> str | None:
    """The log level in lower case, or None. Raises ConfigurationError if there is no such level."""
    text = read(LOGGING_LEVEL, environ)
    if text and text.lower() not in LOG_LEVELS:
        raise ConfigurationError(
            f"{LOGGING_LEVEL.name} must be one of {', '.join(LOG_LEVELS)}, got {text!r}"
        )
    return text.lower() or None


def table() -> str:
    """All variables with their defaults and meanings, for the help."""
    lines = []
    for variable in VARIABLES:
        shown = f" (default: {variable.default})" if variable.default else ""
        lines += [f"  {variable.name}", f"      {variable.help}{shown}"]
    return "\n".join(lines)


def check_environ(environ: Mapping[str, str]) -> None:
    """Raise ConfigurationError if `environ` has a `HEADRACE_*` variable that does not exist."""
    known = [variable.name for variable in VARIABLES]
    for name in environ:
        if not name.startswith(PREFIX) or name in known or _KUBERNETES.fullmatch(name):
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigurationError(
            f"unknown environment variable {name}{hint} (known: {', '.join(known)}); unset it"
        )
