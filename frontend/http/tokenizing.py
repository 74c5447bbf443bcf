"""From a body to the parameters of the renderer that completions and chat share."""

import dataclasses
from typing import Any

from headrace.configs.config import ModelConfig
from headrace.frontend.http.fields import invalid
from headrace.frontend.http.protocol import GenerationBody
from headrace.frontend.render_params import TokenizeParams


def tokenize_params(
    body: GenerationBody, defaults: TokenizeParams, config: ModelConfig, max_tokens: int | None
) -> TokenizeParams:
    """`defaults` with the truncation that the body asks for; a prompt is never cut otherwise.

    -1 keeps as much as leaves room for `max_tokens`, or for one token. Raises InvalidRequestError.
    """
    wanted = body.truncate_prompt_tokens
    if wanted is None:
        return defaults
    longest = config.max_model_len - 1
    if wanted != -1 and not 1 <= wanted <= longest:
        raise invalid(
            "truncate_prompt_tokens", f"must be in [1, {longest}], or -1 for as many as fit", wanted
        )
    if wanted == -1:
        wanted = max(1, config.max_model_len - max(1, max_tokens or 1))
    return dataclasses.replace(
        defaults, truncate_prompt_tokens=wanted, truncation_side=body.truncation_side or "left"
    )


def prompt_extras(body: GenerationBody) -> dict[str, Any] | None:
    """What a prompt has beside its tokens."""
    return None if body.cache_salt is None else {"cache_salt": body.cache_salt}
