"""Text, ids and log-probabilities of one choice as they grow, and outputs that are views of them.

What a step costs does not depend on how much came before: text stays in pieces, and an output
copies its part only when somebody reads it. A reader of cumulative outputs copies everything each
time, as the interface demands; one that falls behind skips those copies.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from headrace.frontend.outputs import CompletionOutput, Logprob

T = TypeVar("T")


class TextPieces:
    """Text in the pieces it arrived in. A range of it is named by the numbers of its pieces."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._prefix = ""  # the joined first `_num_joined` pieces
        self._num_joined = 0

    def __len__(self) -> int:
        return len(self._pieces)

    def append(self, text: str) -> None:
        if text:
            self._pieces.append(text)

    def join(self, start: int, stop: int) -> str:
        """The text of pieces `start` to `stop`; what starts at 0 is joined only once."""
        if start:
            if stop - start == 1:
                return self._pieces[start]
            return "".join(self._pieces[start:stop])
        if stop < self._num_joined:
            return "".join(self._pieces[:stop])
        if stop > self._num_joined:
            new = self._pieces[self._num_joined : stop]
            self._prefix, self._num_joined = "".join([self._prefix, *new]), stop
        return self._prefix


class ChoiceContent:
    """All that one choice has produced; only ever appended to. `logprobs` None: not returned."""

    def __init__(self, with_logprobs: bool) -> None:
        self.token_ids: list[int] = []
        self.text = TextPieces()
        self.logprobs: list[dict[int, Logprob]] | None = [] if with_logprobs else None

    def size(self) -> tuple[int, int]:
        """Number of tokens and of pieces of text."""
        return len(self.token_ids), len(self.text)


class CompletionView(CompletionOutput):
    """A `CompletionOutput` of a range of a growing choice, whose fields are copied when read."""

    def __init__(
        self,
        index: int,
        content: ChoiceContent,
        start: tuple[int, int],
        stop: tuple[int, int],
        cumulative_logprob: float | None,
        finish_reason: str | None,
        stop_reason: int | str | None,
        is_delta: bool,
    ) -> None:
        """`start`, `stop`: the `ChoiceContent.size()` at which the range begins and ends."""
        self.index = index
        self.cumulative_logprob = cumulative_logprob
        self.finish_reason = finish_reason
        self.stop_reason = stop_reason
        self.lora_request = None
        self._content = content
        self._start = start
        self._stop = stop
        self._is_delta = is_delta
        self._read: dict[str, Any] = {}  # field -> value that was handed out, or set

    @property
    def num_tokens(self) -> int:
        """The length of `token_ids`, which is not copied for it."""
        ids = self._read.get("token_ids")
        return self._stop[0] - self._start[0] if ids is None else len(ids)

    @property
    def text(self) -> str:
        text: str | None = self._read.get("text")
        if text is None:
            text = self._content.text.join(self._start[1], self._stop[1])
            self._read["text"] = text
        return text

    @text.setter
    def text(self, value: str) -> None:
        self._read["text"] = value

    @property
    def token_ids(self) -> Any:
        return self._field("token_ids", lambda: self._content.token_ids[self._tokens])

    @token_ids.setter
    def token_ids(self, value: Any) -> None:
        self._read["token_ids"] = value

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        return self._field("logprobs", self._cut_logprobs)

    @logprobs.setter
    def logprobs(self, value: list[dict[int, Logprob]] | None) -> None:
        self._read["logprobs"] = value

    @property
    def _tokens(self) -> slice:
        return slice(self._start[0], self._stop[0])

    def _cut_logprobs(self) -> list[dict[int, Logprob]] | None:
        values = self._content.logprobs
        if values is None or (self._is_delta and self._start[0] == self._stop[0]):
            return None
        return values[self._tokens]

    def _field(self, name: str, make: Callable[[], T]) -> T:
        if name not in self._read:
            self._read[name] = make()
        value: T = self._read[name]
        return value

    def extend(self, new: CompletionOutput) -> None:
        """Append a later delta: at no cost if it follows this one and neither was read."""
        follows = (
            isinstance(new, CompletionView)
            and new._content is self._content
            and new._start == self._stop
            and not self._read
            and not new._read
        )
        if not follows:
            super().extend(new)
            return
        assert isinstance(new, CompletionView)
        self._stop = new._stop
        self.cumulative_logprob = new.cumulative_logprob
        self.finish_reason, self.stop_reason = new.finish_reason, new.stop_reason

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CompletionOutput) and _values(self) == _values(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(CompletionOutput(*_values(self)))

    def __reduce__(self) -> Any:
        """Copies and pickles are plain outputs, without the rest of the choice."""
        return CompletionOutput, _values(self)


def _values(output: CompletionOutput) -> tuple[Any, ...]:
    return (
        output.index,
        output.text,
        output.token_ids,
        output.cumulative_logprob,
        output.logprobs,
        output.finish_reason,
        output.stop_reason,
        output.lora_request,
    )
