"""Options of media in prompts."""

# ruff: noqa: RUF009 (every default here is made by option(), a dataclass field)

import dataclasses
from functools import partial
from typing import Any

from headrace.configs.options import option

_later = partial(option, group="MultiModalConfig", status="later")


@dataclasses.dataclass
class MultiModalOptions:
    """How many media a prompt may have, and how they are read."""

    limit_mm_per_prompt: dict[str, Any] = _later({}, "media per prompt by kind, as JSON")
    media_io_kwargs: dict[str, Any] = _later({}, "options of reading media by kind, as JSON")
    mm_processor_kwargs: dict[str, Any] | None = _later(
        None, "options of the model's media processor, as JSON"
    )
    disable_mm_preprocessor_cache: bool = _later(False, "do not cache processed media")
    interleave_mm_strings: bool = _later(
        False, "keep the order of texts and media in messages of plain text"
    )
