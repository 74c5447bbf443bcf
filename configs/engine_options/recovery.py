"""Options of what happens when an engine core dies or stands still."""

import dataclasses
from functools import partial

from headrace.configs.config import RecoveryConfig
from headrace.configs.options import option

_DEFAULT = RecoveryConfig()
_option = partial(option, group="RecoveryConfig")


@dataclasses.dataclass
class RecoveryOptions:
    """How often an engine core is started again, and when it counts as hung."""

    max_restarts: int = _option(
        _DEFAULT.max_restarts,
        "deaths of an engine core within the window after which it is started again; one more ends "
        "the engine",
        minimum=0,
    )
    restart_window: float = _option(
        _DEFAULT.restart_window_s, "the window for --max-restarts, in seconds", minimum=0
    )
    step_timeout: float = _option(
        _DEFAULT.step_timeout_s,
        "seconds without progress of a step after which an engine core is killed and started again",
        minimum=0.1,
    )
    allow_replay_after_rpc: bool = _option(
        False,
        "go on with requests after a restart even if collective_rpc may have changed the worker "
        "before, which the fresh one knows nothing of",
    )
