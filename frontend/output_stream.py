"""`OutputStream`: the outputs of one request on their way to its consumer."""

import asyncio

from headrace.frontend.outputs import RequestOutput


class OutputStream:
    """A slow consumer gets outputs merged, not queued.

    Merging costs O(1) per token for outputs that are views of a growing choice. Use it on one event
    loop.
    """

    def __init__(self, request_id: str, merges_deltas: bool) -> None:
        self.request_id = request_id  # the internal one
        self._merges_deltas = merges_deltas
        self._item: RequestOutput | None = None
        self._error: BaseException | None = None
        self._news = asyncio.Event()

    def put(self, item: RequestOutput) -> None:
        """Add an output; it belongs to the stream from now on."""
        if self._item is None or not self._merges_deltas:
            self._item = item
        else:
            self._item.add(item, aggregate=True)
        self._news.set()

    def fail(self, error: BaseException) -> None:
        """End the stream; `error` is raised after the outputs that came before it."""
        self._error = error
        self._news.set()

    async def get(self) -> RequestOutput:
        """Everything that is new, as one output; waits for some."""
        await self._news.wait()
        if self._item is None:
            assert self._error is not None
            raise self._error
        item, self._item = self._item, None
        if self._error is None:
            self._news.clear()
        return item
