"""What the HTTP API needs of an engine: `AsyncEngine`, or a scripted one in tests."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from headrace.configs.config import EngineConfig, ModelConfig
from headrace.configs.errors import HeadraceError
from headrace.configs.sampling_params import SamplingParams
from headrace.engine_core.messages import EngineStats
from headrace.frontend.admission import RenderedPrompt
from headrace.frontend.async_engine import EngineState
from headrace.frontend.output_stream import OutputStream
from headrace.frontend.render_params import ChatParams, TokenizeParams
from headrace.frontend.stats import StatLoggerBase


class PromptRenderer(Protocol):
    """Prompts and chats to token ids, off the event loop; both raise InvalidRequestError."""

    @property
    def default_cmpl_tok_params(self) -> TokenizeParams: ...
    @property
    def default_chat_tok_params(self) -> TokenizeParams: ...

    async def render_cmpl_async(
        self,
        prompts: Sequence[Any],
        tok_params: TokenizeParams | None = None,
        *,
        prompt_extras: Mapping[str, Any] | None = None,
    ) -> list[RenderedPrompt]: ...

    async def render_chat_async(
        self,
        conversations: Sequence[Any],
        chat_params: ChatParams,
        tok_params: TokenizeParams | None = None,
        *,
        prompt_extras: Mapping[str, Any] | None = None,
    ) -> tuple[list[Any], list[RenderedPrompt]]: ...


class ServingEngine(Protocol):
    """An engine core with its front end. What it has beside `state` is there once it is ready."""

    @property
    def state(self) -> EngineState: ...
    @property
    def config(self) -> EngineConfig: ...
    @property
    def model_config(self) -> ModelConfig: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def renderer(self) -> PromptRenderer: ...
    @property
    def num_requests(self) -> int: ...
    @property
    def is_up(self) -> bool:
        """Whether an engine core is there now; while it is restarted, requests wait for it."""
        ...

    @property
    def stat_loggers(self) -> Mapping[str, StatLoggerBase]:
        """By name; "prometheus" holds the engine's metrics, unless statistics are off."""
        ...

    async def start(self) -> None:
        """Wait until it is ready. Raises the HeadraceError that says why it cannot start."""
        ...

    def submit(
        self,
        prompt: RenderedPrompt,
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> OutputStream:
        """Begin a request; its outputs come in the stream. Whoever begins one releases it."""
        ...

    def release(self, stream: OutputStream) -> None:
        """Nobody reads the stream any more: its request is aborted if it still runs. Idempotent."""
        ...

    async def call(self, method: str, kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run a utility of the engine core (`EngineCore.UTILITIES`)."""
        ...

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Run a worker's method on every worker; results by rank."""
        ...

    def progress(self) -> dict[str, float | int]: ...
    def stats(self) -> EngineStats | None: ...
    async def wait_dead(self) -> HeadraceError:
        """Return, with the reason, when the engine has died. To be called once it is ready."""
        ...

    async def stop(self) -> None:
        """End it and all that belongs to it; idempotent."""
        ...
