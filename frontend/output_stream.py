"""`OutputStream`: the outputs of one request on their way to its consumer."""

import asyncio
from collections.abc import Callable

from headrace.frontend.outputs import RequestOutput


class OutputStream:
    """A slow consumer gets outputs merged, not queued.

    Merging costs O(1) per token for outputs that are views of a growing choice. Use it on one event
    loop. A consumer waits in `get()`, or is called by `listen` and uses `take()`: the second costs
    no turn of a task for each output.
    """

    def __init__(self, request_id: str, merges_deltas: bool) -> None:
        self.request_id = request_id  # the internal one
        self._merges_deltas = merges_deltas
        self._item: RequestOutput | None = None
        self._error: BaseException | None = None
        self._news = asyncio.Event()
        self._tell: Callable[[], None] = self._news.set

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener`, which must not raise, whenever there is something to take."""
        self._tell = listener
        if self.has_news:
            listener()

    def put(self, item: RequestOutput) -> None:
        """Add an output; it belongs to the stream from now on."""
        if self._item is None or not self._merges_deltas:
            self._item = item
        else:
            self._item.add(item, aggregate=True)
        self._tell()

    def fail(self, error: BaseException) -> None:
        """End the stream; `error` is raised after the outputs that came before it."""
        self._error = error
        self._tell()

    @property
    def has_news(self) -> bool:
        """Whether there is something to take, or an error to raise."""
        return self._item is not None or self._error is not None

    def take(self) -> RequestOutput | None:
        """Everything that is new, as one output; None if nothing is.

        Raises the error that ended the stream, once all that came before it was taken.
        """
        item, self._item = self._item, None
        if item is None and self._error is not None:
            raise self._error
        return item

    async def get(self) -> RequestOutput:
        """Everything that is new, as one output; waits for some."""
        while (item := self.take()) is None:
            self._news.clear()
            await self._news.wait()
        return item
