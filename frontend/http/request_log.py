"""`--enable-log-requests`: which caller's request is which of ours; prompts only at level DEBUG.

Parameters and ends of requests are in the engine's own lines, under the same id.
"""

import logging
from collections.abc import Sequence

from headrace.frontend.admission import RenderedPrompt
from headrace.frontend.http.listener import ServerOptions

logger = logging.getLogger(__name__)


class RequestLog:
    """Writes nothing unless the operator asked for it. Ids in it are ours, so never shared."""

    def __init__(self, options: ServerOptions) -> None:
        self._is_on = options.enable_log_requests
        self._max_len = options.max_log_len

    def received(self, response_id: str, label: str, prompts: Sequence[RenderedPrompt]) -> None:
        """A request is about to run. `label` is the caller's name for it."""
        if not self._is_on:
            return
        lengths = [len(prompt.token_ids) for prompt in prompts]
        logger.info(
            "request %s: X-Request-Id %s, prompts of %s tokens", response_id, label, lengths
        )
        for prompt in prompts:
            logger.debug(
                "request %s: prompt %r, token ids %s",
                response_id,
                prompt.text[: self._max_len] if prompt.text is not None else None,
                prompt.token_ids[: self._max_len],
            )
