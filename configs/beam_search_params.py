"""`BeamSearchParams`: how `LLM.beam_search` searches."""

import math
from dataclasses import dataclass


@dataclass
class BeamSearchParams:
    """Width and length of a beam search; raises ValueError for values that cannot work.

    `length_penalty` is the exponent of the length that a beam's score is divided by.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name, least in (("beam_width", 1), ("max_tokens", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be an int of at least {least}, got {value!r}")
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        if not math.isfinite(self.length_penalty):
            raise ValueError(f"length_penalty must be finite, got {self.length_penalty}")
