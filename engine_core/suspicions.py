"""Which request is to blame when an engine core has died.

The choices of the step that ran are suspects, which run alone when they are replayed. A request
whose choice was alone in a step that an engine core died in, and had been a suspect before without
getting any further, has done it. Death by a signal from outside (an operator, the system for want
of memory) may have nothing to do with it: only the third in a row counts.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.engine_core.fence import Suspect

MAX_DEATHS_FROM_OUTSIDE = 3
_MAX_RECORDS = 10_000
_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})


@dataclass(slots=True)
class _Record:
    """Deaths in a row in steps of one choice, without progress of it in between."""

    num_tokens: int  # that those steps would have computed
    num_from_outside: int = 0
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

    def judge(
        self, suspects: Sequence[Suspect], exit_code: int | None, when: float
    ) -> Verdict | None:
        """Note a death with that exit code (negative: the signal), and who is to blame for it."""
        is_from_outside = exit_code is not None and -exit_code in _OUTSIDE
        for suspect in suspects:
            self._note(suspect, is_from_outside, when)
        if len(suspects) != 1:
            return None
        (alone,) = suspects
        record = self._records[alone.request_id, alone.index]
        if is_from_outside:
            is_guilty = record.num_from_outside >= MAX_DEATHS_FROM_OUTSIDE
        else:
            is_guilty = len(record.deaths) > 1
        if not is_guilty:
            return None
        del self._records[alone.request_id, alone.index]
        return Verdict(alone.request_id, tuple(record.deaths))

    def _note(self, suspect: Suspect, is_from_outside: bool, when: float) -> None:
        key = (suspect.request_id, suspect.index)
        record = self._records.pop(key, None)
        if record is None or suspect.num_computed >= record.num_tokens:
            record = _Record(suspect.num_tokens)
        record.num_tokens = max(record.num_tokens, suspect.num_tokens)
        record.num_from_outside += is_from_outside
        record.deaths.append(when)
        self._records[key] = record
        while len(self._records) > _MAX_RECORDS:
            del self._records[next(iter(self._records))]
