"""What has become of an engine core since its start, beside its requests: the supervisor's journal.

An engine core tells the supervisor whenever it changes; the next one is started with it.
"""

from typing import Literal

import msgspec

from headrace.configs.model_files.weight_source import WeightSource

PauseMode = Literal["abort", "wait", "keep"]
PAUSE_MODES = ("abort", "wait", "keep")

# Parts of an engine that sleep and wake. Scheduling wakes when the memory is there again.
SleepTag = Literal["weights", "kv_cache", "scheduling"]
MEMORY_TAGS: tuple[SleepTag, ...] = ("weights", "kv_cache")
SLEEP_TAGS: tuple[SleepTag, ...] = (*MEMORY_TAGS, "scheduling")


class CoreState(msgspec.Struct, frozen=True, array_like=True):
    """`weight_version` None: as configured. `has_new_weights`: others than the configured ones.

    They can be had again if they came from a checkpoint, `source`. `asleep`: tags.
    """

    weight_version: str | None = None
    has_new_weights: bool = False
    source: WeightSource | None = None
    is_paused: bool = False
    sleep_level: int = 0
    asleep: list[SleepTag] = []
