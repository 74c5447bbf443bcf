"""Streams in tests: their events, and what the pieces of a choice join to."""

import itertools
import json
from collections.abc import Iterable
from typing import Any


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


def events_of(response: Any) -> list[Any]:
    """The events of a stream, the last being "[DONE]"."""
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    data = [line.removeprefix("data: ") for line in lines]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def chunks_of(response: Any) -> list[Any]:
    """The events before [DONE]."""
    *chunks, done = events_of(response)
    assert done == "[DONE]"
    return chunks


def parts_of(chunks: list[Any], index: int) -> list[Any]:
    """The pieces of choice `index`, in order."""
    return [c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == index]
