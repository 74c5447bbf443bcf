"""The ledger of a client: what it has asked for and what it has got, to the token.

It makes delivery exactly once, whatever an engine core says twice, and it is what a replay is made
of: all engine state of a request is a function of its message and its output ids.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from headrace.engine_core.fence import Suspect
from headrace.engine_core.messages import ChoiceState, EngineCoreOutput, EngineCoreRequest
from headrace.workers.protocol import RequestFault, TokenLogprobs


@dataclass(slots=True)
class LedgerEntry:
    """A request in flight. `open`: output ids of its choices that have not ended, by index."""

    request: EngineCoreRequest
    number: int  # order of arrival
    # Of the replica that it runs on, or ran on last, or is pinned to; None: not chosen yet.
    rank: int | None
    open: dict[int, list[int]]
    is_pinned: bool = False
    is_waiting: bool = True  # no engine core has it
    was_sent: bool = False
    was_replayed: bool = False
    num_prompt_logprobs: int = 0  # leading prompt tokens whose scores have come; 0 and 1: none
    num_cached_tokens: int | None = None  # as first reported
    alone_until: dict[int, int] = field(default_factory=dict)  # choice -> tokens; see `suspect`

    @property
    def has_output(self) -> bool:
        """Whether a caller may have seen something of it."""
        return (
            any(self.open.values())
            or len(self.open) < len(self.request.choices)
            or self.num_prompt_logprobs > 0
        )


class RequestLedger:
    """Every request in flight of one client."""

    def __init__(self) -> None:
        self._entries: dict[str, LedgerEntry] = {}
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def entries(self) -> list[LedgerEntry]:
        """All of them, in order of arrival."""
        return list(self._entries.values())

    def get(self, request_id: str) -> LedgerEntry | None:
        """None once it has ended."""
        return self._entries.get(request_id)

    def add(self, request: EngineCoreRequest, pinned_to: int | None = None) -> LedgerEntry:
        """Follow a request, which waits until `send` hands it out."""
        self._num_added += 1
        choices = {choice.index: list(choice.output_token_ids) for choice in request.choices}
        is_pinned = pinned_to is not None
        entry = LedgerEntry(request, self._num_added, pinned_to, choices, is_pinned)
        self._entries[request.request_id] = entry
        return entry

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Forget a request, or one choice of it; what still comes of it is dropped."""
        entry = self._entries.get(request_id)
        if entry is not None:
            for ended in list(entry.open) if index is None else [index]:
                self._close(entry, ended)

    def accept(self, output: EngineCoreOutput) -> EngineCoreOutput | None:
        """What is new in an output; None if nothing is.

        An output that contradicts what is known, or leaves a gap, is replaced by a fault, which
        ends the choice.
        """
        entry = self._entries.get(output.request_id)
        known = None if entry is None else entry.open.get(output.index)
        if entry is None or known is None:
            return None
        problem = self._trim(entry, known, output)
        if problem is not None:
            self._close(entry, output.index)
            return failure(output.request_id, output.index, len(known), problem)
        known += output.new_token_ids
        if entry.num_cached_tokens is None:
            entry.num_cached_tokens = output.num_cached_tokens
        elif entry.was_replayed:  # the replay found other prefixes in the cache
            output.num_cached_tokens = entry.num_cached_tokens
        if output.finish_reason is not None:
            self._close(entry, output.index)
        return output

    def suspect(self, suspects: Iterable[Suspect]) -> set[str]:
        """Note choices that were in a step when their engine core died: they are to run alone until
        they are past that point. Returns the ids of this ledger's requests among them.
        """
        found = set()
        for suspect in suspects:
            entry = self._entries.get(suspect.request_id)
            if entry is not None and suspect.index in entry.open:
                known = entry.alone_until.get(suspect.index, 0)
                entry.alone_until[suspect.index] = max(known, suspect.num_tokens)
                found.add(suspect.request_id)
        return found

    def fail(self, request_id: str, fault: RequestFault) -> list[EngineCoreOutput]:
        """End a request; the outputs that say so, one for each open choice."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return []
        return [
            failure(request_id, index, len(known), fault) for index, known in entry.open.items()
        ]

    def lose(self, rank: int) -> None:
        """The engine core of a replica is gone: its requests wait."""
        for entry in self._entries.values():
            entry.is_waiting |= entry.rank == rank

    def waiting(self) -> list[LedgerEntry]:
        """Requests that no engine core has, in the order in which to send them.

        That is the order of arrival, with suspects last.
        """
        chosen = [entry for entry in self._entries.values() if entry.is_waiting]
        for entry in chosen:
            _forget_passed(entry)
        chosen.sort(key=lambda entry: (bool(entry.alone_until), entry.number))
        return chosen

    def message(self, entry: LedgerEntry) -> EngineCoreRequest:
        """What a fresh engine core has to be sent for a request, from where its caller is."""
        alone: Mapping[int, int] = entry.alone_until
        return msgspec.structs.replace(
            entry.request,
            choices=[
                ChoiceState(index, list(known), alone.get(index, 0))
                for index, known in entry.open.items()
            ],
            num_prompt_logprobs_received=entry.num_prompt_logprobs,
        )

    def sent(self, entry: LedgerEntry, rank: int) -> None:
        """That message is on its way to a replica."""
        entry.was_replayed |= entry.was_sent
        entry.was_sent, entry.is_waiting, entry.rank = True, False, rank

    def _trim(
        self, entry: LedgerEntry, known: list[int], output: EngineCoreOutput
    ) -> RequestFault | None:
        """Take out of `output` what is known; what is wrong with it, if anything."""
        request_id, overlap = output.request_id, len(known) - output.start
        if overlap < 0:
            return _protocol_error(request_id, f"output {output.start} came, {len(known)} was next")
        if overlap > 0:
            repeated = known[output.start : output.start + len(output.new_token_ids)]
            if repeated != output.new_token_ids[: len(repeated)]:
                return _protocol_error(request_id, "an output that was repeated differs")
            output.start += len(repeated)
            output.new_token_ids = output.new_token_ids[len(repeated) :]
            if output.logprobs is not None:
                output.logprobs = output.logprobs[len(repeated) :]
            if output.start < len(known):  # it ends before what is known: only a late copy
                output.start = len(known)
        return self._trim_scores(entry, output)

    def _trim_scores(self, entry: LedgerEntry, output: EngineCoreOutput) -> RequestFault | None:
        scores: list[TokenLogprobs] | None = output.prompt_logprobs
        if scores is None:
            return None
        known = max(1, entry.num_prompt_logprobs)  # the first token has none
        overlap = known - output.prompt_logprobs_start
        if overlap < 0:
            return _protocol_error(
                output.request_id,
                f"the score of prompt token {output.prompt_logprobs_start} came, {known} was next",
            )
        if overlap > 0:
            output.prompt_logprobs = scores = scores[overlap:]
            output.prompt_logprobs_start = known
        entry.num_prompt_logprobs = known + len(scores)
        return None

    def _close(self, entry: LedgerEntry, index: int) -> None:
        entry.open.pop(index, None)
        if not entry.open:
            self._entries.pop(entry.request.request_id, None)


def failure(request_id: str, index: int, start: int, fault: RequestFault) -> EngineCoreOutput:
    """The output of a choice that ends with `fault`."""
    return EngineCoreOutput(request_id, index, start, [], finish_reason="error", fault=fault)


def _forget_passed(entry: LedgerEntry) -> None:
    """Choices that are past the point where their engine core died are no suspects any more."""
    num_prompt = len(entry.request.prompt_token_ids)
    for index, num_tokens in list(entry.alone_until.items()):
        known = entry.open.get(index)
        if known is None or num_prompt + len(known) > num_tokens:
            del entry.alone_until[index]


def _protocol_error(request_id: str, text: str) -> RequestFault:
    return RequestFault("request_failed", f"request {request_id}: {text}; the engine core is wrong")
