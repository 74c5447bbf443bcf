"""What a start-up reports: named phases, what overlapped with them, memory, facts of the model."""

import logging
import time
from dataclasses import dataclass, field

from headrace.configs.config import ModelConfig
from headrace.frontend.sampling_defaults import sampling_facts
from headrace.frontend.tokenizers import Tokenizer

logger = logging.getLogger(__name__)


@dataclass
class StartupReport:
    """Collects phases. `began` is when the clock started (seconds since the epoch).

    `starts_core`: whether the engine core starts with this front end; else it was there before.
    """

    began: float
    starts_core: bool = True
    critical: dict[str, float] = field(default_factory=dict)  # phase -> seconds, in order
    overlapped: dict[str, float] = field(default_factory=dict)
    total: float = 0.0

    def add_overlapped(self, phase: str, since: float) -> None:
        """A phase that ran beside the critical path, from `since` until now."""
        self.overlapped[phase] = time.time() - since

    def finish(self, spawned: float, core_phases: dict[str, float], core_ready: float) -> None:
        """The engine core was started at `spawned` and reported `core_phases` at `core_ready`."""
        now = time.time()
        self.critical = {"start front end": spawned - self.began, **core_phases}
        self.critical["finish front end"] = now - core_ready
        self.total = now - self.began

    def table(self) -> str:
        """One line per phase, in seconds."""
        lines = ["start-up, in seconds:"]
        lines += [f"  {phase:<28}{seconds:7.2f}" for phase, seconds in self.critical.items()]
        accounted = sum(self.critical.values())
        lines.append(f"  {'ready':<28}{self.total:7.2f}   (phases add up to {accounted:.2f})")
        lines += [
            f"  {phase:<28}{seconds:7.2f}   (overlapped, not counted)"
            for phase, seconds in self.overlapped.items()
        ]
        return "\n".join(lines)


def log_model_facts(model_config: ModelConfig, tokenizer: Tokenizer | None) -> None:
    """Log which tokens end a sequence, and which sampling defaults hold."""
    for line in sampling_facts(model_config, tokenizer):
        logger.info("%s", line)


def memory_table(memory: dict[str, int]) -> str:
    """The memory budget in MiB, one line each."""
    lines = ["memory, in MiB:"]
    lines += [f"  {name:<28}{value / 2**20:9.1f}" for name, value in memory.items()]
    return "\n".join(lines)
