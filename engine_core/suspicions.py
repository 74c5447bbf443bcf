"""Which request is to blame when an engine core has died.

The choices of the step that ran are suspects, which run alone when they are replayed. A request
whose choice was alone in a step that an engine core died in, and had been a suspect before without
getting any further, has done it. If the system took the engine core for want of memory, that may
have nothing to do with what ran: only the third time in a row counts. What an operator does makes
nobody a suspect.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.engine_core.deaths import Cause
from headrace.engine_core.fence import Suspect

MAX_DEATHS_BY_MEMORY = 3
_MAX_RECORDS = 10_000


@dataclass(slots=True)
class _Record:
    """Deaths in a row in steps of one choice, without progress of it in between."""

    num_tokens: int  # that those steps would have computed
    num_by_memory: int = 0
    deaths: list[float] = field(default_factory=list)  # when; whatever the caller calls time


@dataclass(frozen=True)
class Verdict:
    """The request to blame, and the deaths that were its doing."""

    request_id: str
    deaths: tuple[float, ...]


class Suspicions:
    """What is known of the suspects of all deaths so far."""

    def __init__(self) -> None:
        self._records: dict[tuple[str, int], _Record] = {}

    def judge(self, suspects: Sequence[Suspect], cause: Cause, when: float) -> Verdict | None:
        """Note a death in a step of `suspects`; who is to blame for it, if anybody."""
        if cause is Cause.OPERATOR:
            return None
        is_by_memory = cause is Cause.MEMORY
        for suspect in suspects:
            self._note(suspect, is_by_memory, when)
        if len(suspects) != 1:
            return None
        (alone,) = suspects
        record = self._records[alone.request_id, alone.index]
        if is_by_memory:
            is_guilty = record.num_by_memory >= MAX_DEATHS_BY_MEMORY
        else:
            is_guilty = len(record.deaths) > 1
        if not is_guilty:
            return None
        del self._records[alone.request_id, alone.index]
        return Verdict(alone.request_id, tuple(record.deaths))

    def _note(self, suspect: Suspect, is_by_memory: bool, when: float) -> None:
        key = (suspect.request_id, suspect.index)
        record = self._records.pop(key, None)
        if record is None or suspect.num_computed >= record.num_tokens:
            record = _Record(suspect.num_tokens)
        record.num_tokens = max(record.num_tokens, suspect.num_tokens)
        record.num_by_memory += is_by_memory
        record.deaths.append(when)
        self._records[key] = record
        while len(self._records) > _MAX_RECORDS:
            del self._records[next(iter(self._records))]
