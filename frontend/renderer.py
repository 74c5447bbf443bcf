"""`Renderer`: prompts and chat messages to token ids.

CPU work runs in a bounded pool, never on an event loop.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from headrace.configs.config import ModelConfig
from headrace.configs.errors import InvalidRequestError
from headrace.configs.model_files.cache_dir import cache_dir
from headrace.frontend.admission import RenderedPrompt
from headrace.frontend.chat_template import render_chat
from headrace.frontend.tokenizers import Tokenizer, load_tokenizer

NUM_WORKERS = 1  # a 2-core machine has one core to spare at most; encodes queue up in order


class Renderer:
    """One per front end. The asynchronous methods give the same results as the synchronous ones."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._pool = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="renderer")
        self._lock = threading.Lock()  # a tokenizer is used by one thread at a time

    @classmethod
    def from_config(cls, model_config: ModelConfig) -> "Renderer":
        """Load the tokenizer; raises ModelFileError."""
        return cls(load_tokenizer(Path(model_config.tokenizer_path), cache_dir(os.environ)))

    def completion(
        self, prompt: str | Sequence[int], add_special_tokens: bool = True
    ) -> RenderedPrompt:
        """Ids of a raw prompt; special tokens spelled in it are special. Ids pass unchanged."""
        if not isinstance(prompt, str):
            return RenderedPrompt(None, list(prompt))
        with self._lock:
            ids = self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        return RenderedPrompt(prompt, ids, self._warnings(ids))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> RenderedPrompt:
        """Ids of a conversation by the model's template (or the operator's `chat_template`)."""
        with self._lock:
            rendered = render_chat(
                self.tokenizer,
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
                chat_template=chat_template,
            )
        return RenderedPrompt(rendered.text, rendered.token_ids)

    async def render_completion(
        self, prompt: str | Sequence[int], add_special_tokens: bool = True
    ) -> RenderedPrompt:
        return await self._run(lambda: self.completion(prompt, add_special_tokens))

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        return await self._run(
            lambda: self.chat(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
            )
        )

    async def _run(self, work: Callable[[], RenderedPrompt]) -> RenderedPrompt:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _warnings(self, ids: list[int]) -> tuple[str, ...]:
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            return (
                f"the prompt starts with the start token {self.tokenizer.bos_token!r} twice: it is "
                "added anyway, so leave it out of the text or send add_special_tokens=false",
            )
        return ()


def prompt_of(item: Any) -> str | list[int]:
    """The text or ids of one prompt of the Python API: a str, a list of ids, or a prompt dict."""
    if isinstance(item, str):
        return item
    if isinstance(item, Mapping):
        for feature in ("prompt_embeds", "encoder_prompt"):
            if feature in item:
                raise InvalidRequestError(f"prompts with {feature!r} are not supported", feature)
        if item.get("multi_modal_data"):
            raise InvalidRequestError("this model takes text only", "multi_modal_data")
        if "prompt_token_ids" in item:
            return list(item["prompt_token_ids"])
        if isinstance(item.get("prompt"), str):
            return str(item["prompt"])
    elif isinstance(item, Sequence):
        return list(item)
    raise InvalidRequestError(
        "a prompt is a str, a list of token ids, {'prompt': str} or {'prompt_token_ids': [int]}, "
        f"got {type(item).__name__}",
        "prompt",
    )
