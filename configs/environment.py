"""Every `HEADRACE_*` environment variable, in one registry; an unknown one is an error."""

import difflib
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
VARIABLES = (MULTIPROCESSING, CACHE, API_KEY)


def read(variable: Variable, environ: Mapping[str, str]) -> str:
    """The variable's value in `environ`, or its default."""
    return environ.get(variable.name, variable.default)


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
