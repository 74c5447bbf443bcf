"""What the HTTP API needs of an engine: `AsyncEngine`, or a scripted one in tests."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from headrace.configs.config import ModelConfig
from headrace.configs.errors import HeadraceError
from headrace.configs.sampling_params import SamplingParams
from headrace.engine_core.messages import EngineStats
from headrace.frontend.admission import RenderedPrompt
from headrace.frontend.async_engine import EngineState
from headrace.frontend.outputs import RequestOutput


class PromptRenderer(Protocol):
    """Prompts and messages to token ids; both raise InvalidRequestError."""

    async def render_completion(
        self, prompt: str | Sequence[int], add_special_tokens: bool = True
    ) -> RenderedPrompt: ...

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt: ...


class ServingEngine(Protocol):
    """An engine core with its front end. What it has beside `state` is there once it is ready."""

    @property
    def state(self) -> EngineState: ...
    @property
    def model_config(self) -> ModelConfig: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def renderer(self) -> PromptRenderer: ...
    @property
    def num_requests(self) -> int: ...

    async def start(self) -> None:
        """Wait until it is ready. Raises the HeadraceError that says why it cannot start."""
        ...

    def generate(
        self,
        prompt: RenderedPrompt,
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one request; closing the iterator, or cancelling its consumer, aborts it."""
        ...

    def progress(self) -> dict[str, float | int]: ...
    def stats(self) -> EngineStats | None: ...
    async def wait_dead(self) -> HeadraceError:
        """Return, with the reason, when the engine has died. To be called once it is ready."""
        ...

    async def stop(self) -> None:
        """End it and all that belongs to it; idempotent."""
        ...
