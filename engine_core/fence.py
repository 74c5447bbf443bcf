"""The fence: what an engine core is at, in memory that outlives it.

The supervisor makes it (a memfd, passed by descriptor) and reads it when the engine core has died:
the choices of the steps that ran then are suspects. Its pulse tells a hung engine core from a busy
one. Nothing here is locked: a reader of a living engine core looks at single numbers only.

Layout: a header, then a slot for each step that can be in flight: a slot header, and the step's
choices in msgpack. Steps that decode the same choices as the one before only count `repeats`.
"""

import mmap
import os
import struct
import time
from collections.abc import Sequence

import msgspec

from headrace.workers.protocol import ChoiceId, SchedulerOutput

MAX_SLOTS = 16
SLOT_BYTES = 1 << 20  # of which only what is written takes memory
_HEADER = struct.Struct("<dBB")  # pulse (monotonic seconds), whether it is watched, is modified
_SLOT = struct.Struct("<QQIB")  # step, repeats, payload bytes, whether the step runs
_FIRST_SLOT = 4096
_SIZE = _FIRST_SLOT + MAX_SLOTS * SLOT_BYTES
_MODIFIED = struct.Struct("<B")
_MODIFIED_OFFSET = 9


class Suspect(msgspec.Struct, frozen=True, array_like=True):
    """A choice of a step that was running when its engine core died.

    Counts of its tokens, the prompt included: that were computed before the step, and that would
    have been after it.
    """

    request_id: str
    index: int
    num_computed: int
    num_tokens: int


def make_fence() -> int:
    """The descriptor of an empty fence."""
    fd = os.memfd_create("headrace-fence", os.MFD_CLOEXEC)
    os.ftruncate(fd, _SIZE)
    return fd


class FenceWriter:
    """The engine core's side; one thread uses it. A step costs it microseconds."""

    def __init__(self, fd: int, num_slots: int = 1) -> None:
        """`num_slots`: steps that can be in flight at once."""
        self._memory = mmap.mmap(fd, _SIZE)
        self._num_slots = min(num_slots, MAX_SLOTS)
        self._decoded: list[dict[ChoiceId, int] | None] = [None] * self._num_slots
        self._repeats = [0] * self._num_slots
        self._lengths = [0] * self._num_slots
        self._modified = 0
        self.beat()

    def beat(self, *, is_watched: bool = True) -> None:
        """The loop goes on. Not watched: what comes now may take any time, a script's call say."""
        _HEADER.pack_into(self._memory, 0, time.monotonic(), is_watched, self._modified)

    def mark_modified(self) -> None:
        """The worker may no longer be what its configuration says: a replay would differ."""
        self._modified = 1
        _MODIFIED.pack_into(self._memory, _MODIFIED_OFFSET, 1)

    def begin(self, step: SchedulerOutput) -> None:
        """The step is handed out now."""
        slot = step.step % self._num_slots
        offset = _FIRST_SLOT + slot * SLOT_BYTES
        counts, before = step.num_scheduled_tokens, self._decoded[slot]
        decodes = sum(counts.values()) == len(counts)
        if decodes and before is not None and before.keys() == counts.keys():
            self._repeats[slot] += 1
        else:
            self._repeats[slot] = 0
            self._write_choices(slot, step)
            self._decoded[slot] = counts if decodes else None
        _SLOT.pack_into(
            self._memory, offset, step.step, self._repeats[slot], self._lengths[slot], 1
        )

    def end(self, step: int) -> None:
        """The step, and all that follows from it, is done."""
        slot = step % self._num_slots
        offset = _FIRST_SLOT + slot * SLOT_BYTES
        _SLOT.pack_into(self._memory, offset, step, self._repeats[slot], self._lengths[slot], 0)

    def _write_choices(self, slot: int, step: SchedulerOutput) -> None:
        counts = step.num_scheduled_tokens
        suspects = [
            Suspect(
                id.request_id, id.index, before := data.num_computed_tokens, before + counts[id]
            )
            for requests in (step.new_requests, step.cached_requests)
            for data in requests
            if (id := data.choice_id) in counts
        ]
        payload = msgspec.msgpack.encode(suspects)
        room = SLOT_BYTES - _SLOT.size
        if len(payload) > room:  # thousands of choices: the last ones are not suspected
            payload = msgspec.msgpack.encode(suspects[: len(suspects) * room // len(payload) // 2])
        start = _FIRST_SLOT + slot * SLOT_BYTES + _SLOT.size
        self._memory[start : start + len(payload)] = payload
        self._lengths[slot] = len(payload)


class FenceReader:
    """The supervisor's side."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, _SIZE, prot=mmap.PROT_READ)

    def pulse(self) -> float | None:
        """When the loop last went on (monotonic seconds); None while it may take any time."""
        pulse, is_watched, _ = _HEADER.unpack_from(self._memory, 0)
        return pulse if is_watched else None

    def is_modified(self) -> bool:
        """Whether the worker may no longer be what its configuration says."""
        return bool(_HEADER.unpack_from(self._memory, 0)[2])

    def made_progress(self) -> bool:
        """Whether any step was done."""
        steps = (
            _SLOT.unpack_from(self._memory, _FIRST_SLOT + slot * SLOT_BYTES)
            for slot in range(MAX_SLOTS)
        )
        return any(step > is_running for step, _, _, is_running in steps)

    def suspects(self) -> list[Suspect]:
        """Choices of the steps that were running when the engine core died."""
        found: list[Suspect] = []
        for slot in range(MAX_SLOTS):
            found += self._suspects_of(_FIRST_SLOT + slot * SLOT_BYTES)
        return found

    def _suspects_of(self, offset: int) -> Sequence[Suspect]:
        _, repeats, length, is_running = _SLOT.unpack_from(self._memory, offset)
        if not is_running or length > SLOT_BYTES - _SLOT.size:
            return ()
        start = offset + _SLOT.size
        try:
            suspects = msgspec.msgpack.decode(
                self._memory[start : start + length], type=list[Suspect]
            )
        except msgspec.DecodeError:  # it died while it wrote
            return ()
        if not repeats:
            return suspects
        return [
            Suspect(s.request_id, s.index, s.num_computed + repeats, s.num_tokens + repeats)
            for s in suspects
        ]

    def header(self) -> list[tuple[int, bytes]]:
        """For a `FenceCopy`: what `pulse` and `is_modified` look at."""
        return [(0, self._memory[: _HEADER.size])]

    def content(self) -> list[tuple[int, bytes]]:
        """For a `FenceCopy`: everything, of an engine core that has died."""
        pieces = self.header()
        for slot in range(MAX_SLOTS):
            offset = _FIRST_SLOT + slot * SLOT_BYTES
            step, _, length, _ = _SLOT.unpack_from(self._memory, offset)
            if step:
                end = offset + _SLOT.size + min(length, SLOT_BYTES - _SLOT.size)
                pieces.append((offset, self._memory[offset:end]))
        return pieces

    def close(self) -> None:
        self._memory.close()


class FenceCopy:
    """A fence that follows one on another machine; a `FenceReader` sees no difference.

    But for the pulse, whose clock is the other machine's.
    """

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, _SIZE)

    def put(self, pieces: list[tuple[int, bytes]]) -> None:
        for offset, piece in pieces:
            self._memory[offset : offset + len(piece)] = piece
