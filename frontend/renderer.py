"""`Renderer`: prompts and chat messages to token ids.

CPU work runs in a bounded pool, never on an event loop. The asynchronous methods give the same
results as the synchronous ones, in the order of their input; the first prompt that fails fails the
call.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from headrace.configs.config import ModelConfig
from headrace.configs.errors import InvalidRequestError
from headrace.configs.model_files.cache_dir import cache_dir
from headrace.frontend.admission import RenderedPrompt
from headrace.frontend.batched_tokenizer import BatchedTokenizer
from headrace.frontend.chat_template import RenderedChat, render_chat
from headrace.frontend.prompts import check_supported, prompt_dict
from headrace.frontend.render_params import ChatParams, TokenizeParams
from headrace.frontend.tokenizers import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")
Messages = Sequence[Mapping[str, Any]]
Conversation = list[dict[str, Any]]


class Renderer:
    """One per front end. `tokenizer` None: prompts are token ids, and there is no text."""

    def __init__(self, model_config: ModelConfig, tokenizer: Tokenizer | None) -> None:
        self.model_config = model_config
        self.tokenizer = tokenizer
        # Threads share the tokenizer: it never changes after it was loaded.
        self._pool = ThreadPoolExecutor(
            model_config.renderer_num_workers, thread_name_prefix="renderer"
        )
        self._async_tokenizer: BatchedTokenizer | None = None
        self._warned_of_no_tokenizer = False

    @classmethod
    def from_config(cls, model_config: ModelConfig) -> "Renderer":
        """Load the tokenizer, unless the configuration says not to; raises ModelFileError."""
        if model_config.skip_tokenizer_init:
            return cls(model_config, None)
        path = Path(model_config.tokenizer_path)
        tokenizer = load_tokenizer(path, cache_dir(os.environ))
        _ = tokenizer.max_chars_per_token  # looks at the whole vocabulary: not on an event loop
        return cls(model_config, tokenizer)

    # Prompts

    def render_cmpl(
        self,
        prompts: Sequence[Any],
        tok_params: TokenizeParams | None = None,
        *,
        prompt_extras: Mapping[str, Any] | None = None,
    ) -> list[RenderedPrompt]:
        """Ids of raw prompts; special tokens spelled in a text are special. Ids pass as they are.

        `prompt_extras` (a cache salt, say) go before what a prompt has under the same keys. Raises
        ValueError (InvalidRequestError) or TypeError.
        """
        arrival_time = time.time()
        params = tok_params or self.default_cmpl_tok_params
        return [
            self._render_prompt(prompt, params, prompt_extras, arrival_time)
            for prompt in self._prompt_dicts(prompts, params)
        ]

    async def render_cmpl_async(
        self,
        prompts: Sequence[Any],
        tok_params: TokenizeParams | None = None,
        *,
        prompt_extras: Mapping[str, Any] | None = None,
    ) -> list[RenderedPrompt]:
        """As `render_cmpl`; the texts are encoded together with those of other calls."""
        arrival_time = time.time()
        params = tok_params or self.default_cmpl_tok_params
        return await _all_of(
            self._render_prompt_async(prompt, params, prompt_extras, arrival_time)
            for prompt in self._prompt_dicts(prompts, params)
        )

    def _prompt_dicts(self, prompts: Sequence[Any], params: TokenizeParams) -> list[dict[str, Any]]:
        """Everything that can be refused before any work is done."""
        if isinstance(prompts, str | bytes | Mapping):
            raise TypeError(f"prompts must be a list, got {type(prompts).__name__}")
        if not prompts:
            raise InvalidRequestError("there must be at least one prompt, got none", "prompt")
        dicts = [prompt_dict(prompt) for prompt in prompts]
        for prompt in dicts:
            if "prompt_token_ids" not in prompt:
                prompt["_to_encode"] = params.prepare_text(prompt["prompt"], self.get_tokenizer())
        return dicts

    def _render_prompt(
        self,
        prompt: dict[str, Any],
        params: TokenizeParams,
        extras: Mapping[str, Any] | None,
        arrival_time: float,
    ) -> RenderedPrompt:
        text = prompt.pop("_to_encode", None)
        if text is not None:
            ids = self.get_tokenizer().encode(text, params.add_special_tokens)
            return self._finish_text(prompt, ids, params, extras, arrival_time)
        if params.needs_detokenization and prompt.get("prompt") is None:
            prompt["prompt"] = self.get_tokenizer().decode(prompt["prompt_token_ids"], False)
        return self._finish_ids(prompt, params, extras, arrival_time)

    async def _render_prompt_async(
        self,
        prompt: dict[str, Any],
        params: TokenizeParams,
        extras: Mapping[str, Any] | None,
        arrival_time: float,
    ) -> RenderedPrompt:
        text = prompt.pop("_to_encode", None)
        if text is not None:
            ids = await self.get_async_tokenizer().encode(text, params.add_special_tokens)
            return self._finish_text(prompt, ids, params, extras, arrival_time)
        if params.needs_detokenization and prompt.get("prompt") is None:
            ids = prompt["prompt_token_ids"]
            prompt["prompt"] = await self.get_async_tokenizer().decode(ids, False)
        return self._finish_ids(prompt, params, extras, arrival_time)

    def _finish_text(
        self,
        prompt: dict[str, Any],
        ids: list[int],
        params: TokenizeParams,
        extras: Mapping[str, Any] | None,
        arrival_time: float,
    ) -> RenderedPrompt:
        warnings = self._warnings(ids)
        ids = params.finish(ids, self.tokenizer, was_text=True)
        return _rendered({**prompt, "prompt_token_ids": ids}, extras, arrival_time, warnings)

    def _finish_ids(
        self,
        prompt: dict[str, Any],
        params: TokenizeParams,
        extras: Mapping[str, Any] | None,
        arrival_time: float,
    ) -> RenderedPrompt:
        ids = params.finish(prompt["prompt_token_ids"], self.tokenizer)
        return _rendered({**prompt, "prompt_token_ids": ids}, extras, arrival_time)

    # Messages

    def render_chat(
        self,
        conversations: Sequence[Messages],
        chat_params: ChatParams,
        tok_params: TokenizeParams | None = None,
        *,
        prompt_extras: Mapping[str, Any] | None = None,
    ) -> tuple[list[Conversation], list[RenderedPrompt]]:
        """Ids of conversations by the operator's or the model's template.

        Also returns the messages as the template got them. Raises InvalidRequestError.
        """
        arrival_time = time.time()
        params = tok_params or self.default_chat_tok_params
        chats = [self._render_messages(messages, chat_params) for messages in conversations]
        return self._finish_chats(chats, params, prompt_extras, arrival_time)

    async def render_chat_async(
        self,
        conversations: Sequence[Messages],
        chat_params: ChatParams,
        tok_params: TokenizeParams | None = None,
        *,
        prompt_extras: Mapping[str, Any] | None = None,
    ) -> tuple[list[Conversation], list[RenderedPrompt]]:
        """As `render_chat`, in the pool."""
        arrival_time = time.time()
        params = tok_params or self.default_chat_tok_params
        chats = await _all_of(
            self._run(partial(self._render_messages, messages, chat_params))
            for messages in conversations
        )
        return self._finish_chats(chats, params, prompt_extras, arrival_time)

    def _render_messages(self, messages: Messages, chat_params: ChatParams) -> RenderedChat:
        return render_chat(self.get_tokenizer(), messages, chat_params)

    def _finish_chats(
        self,
        chats: Sequence[RenderedChat],
        params: TokenizeParams,
        extras: Mapping[str, Any] | None,
        arrival_time: float,
    ) -> tuple[list[Conversation], list[RenderedPrompt]]:
        prompts = [
            self._finish_ids(
                {"prompt": chat.text, "prompt_token_ids": chat.token_ids},
                params, extras, arrival_time,
            )
            for chat in chats
        ]  # fmt: skip
        return [chat.conversation for chat in chats], prompts

    # Parts and facts

    @cached_property
    def default_cmpl_tok_params(self) -> TokenizeParams:
        """For raw prompts: with special tokens, up to the context length, never cut."""
        return TokenizeParams(self.model_config.max_model_len, add_special_tokens=True)

    @cached_property
    def default_chat_tok_params(self) -> TokenizeParams:
        """For messages: the template has written the special tokens."""
        return TokenizeParams(self.model_config.max_model_len, add_special_tokens=False)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer; InvalidRequestError (a ValueError) if there is none."""
        if self.tokenizer is None:
            raise InvalidRequestError(
                "this engine runs without a tokenizer (skip_tokenizer_init): send token ids",
                "prompt",
            )
        return self.tokenizer

    def get_async_tokenizer(self) -> BatchedTokenizer:
        """The tokenizer for coroutines, always the same object. Needs a running event loop."""
        asyncio.get_running_loop()
        if self._async_tokenizer is None:
            self._async_tokenizer = BatchedTokenizer(self.get_tokenizer(), self._pool)
        return self._async_tokenizer

    def get_bos_token_id(self) -> int | None:
        return self._special_id("bos_token_id")

    def get_eos_token_id(self) -> int | None:
        return self._special_id("eos_token_id")

    def _special_id(self, name: str) -> int | None:
        if self.tokenizer is None:
            if not self._warned_of_no_tokenizer:
                logger.warning("there is no tokenizer, so %s is not known", name)
                self._warned_of_no_tokenizer = True
            return None
        token_id: int | None = getattr(self.tokenizer, name)
        return token_id

    def warmup(self, chat_params: ChatParams) -> None:
        """Do once what the first request would wait for. Never raises."""
        if self.tokenizer is None:
            return
        messages = [{"role": "user", "content": "Hello"}]
        try:
            _ = self.tokenizer.max_chars_per_token
            self.render_chat([messages], chat_params)
        except Exception as error:
            has_template = chat_params.chat_template or self.tokenizer.chat_template
            level = logging.WARNING if has_template else logging.DEBUG
            logger.log(level, "the renderer's warm-up failed: %s", error)

    def shutdown(self) -> None:
        """Take no more work; what waits in the pool is dropped. Returns at once; idempotent."""
        pool = getattr(self, "_pool", None)  # construction may have failed before it was there
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _warnings(self, ids: list[int]) -> tuple[str, ...]:
        tokenizer = self.get_tokenizer()
        bos = tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            return (
                f"the prompt starts with the start token {tokenizer.bos_token!r} twice: it is "
                "added anyway, so leave it out of the text or send add_special_tokens=false",
            )
        return ()


def _rendered(
    prompt: dict[str, Any],
    extras: Mapping[str, Any] | None,
    arrival_time: float,
    warnings: tuple[str, ...] = (),
) -> RenderedPrompt:
    if extras:
        check_supported(extras)
        prompt.update(extras)
    return RenderedPrompt(
        text=prompt.get("prompt"),
        token_ids=prompt["prompt_token_ids"],
        warnings=warnings,
        cache_salt=prompt.get("cache_salt") or None,
        arrival_time=arrival_time,
    )


async def _all_of(work: Any) -> list[Any]:
    """All results in order; the first error ends the others."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        raise
