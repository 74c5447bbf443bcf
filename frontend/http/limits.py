"""Every limit on what a client may send, in one table.

`docs/limits.md` is made from it by `limits_table()`; a test keeps the two equal. A request that is
over a limit is answered with the status of its row, never with a 5xx.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

KIB = 2**10
MIB = 2**20


def _limit(default: float, status: int, what: str, flag: str = "") -> Any:
    metadata = {"status": status, "what": what, "flag": flag}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class RequestLimits:
    """What one request may have at most; each field is a row of the table."""

    max_header_count: int = _limit(256, 431, "request headers", "--h11-max-header-count")
    max_header_bytes: int = _limit(
        64 * KIB, 431, "bytes of all request headers, names and values",
        "--h11-max-incomplete-event-size",
    )  # fmt: skip
    max_url_bytes: int = _limit(64 * KIB, 414, "bytes of the path and the query")
    max_body_bytes: int = _limit(16 * MIB, 413, "bytes of the body, chunked or not")
    header_timeout_s: float = _limit(
        15.0, 408, "seconds from the first byte of a request to the end of its headers"
    )
    body_timeout_s: float = _limit(30.0, 408, "seconds without a byte of a body that is being sent")
    body_total_timeout_s: float = _limit(
        300.0, 408, "seconds from the end of the headers to the end of the body"
    )
    max_json_depth: int = _limit(128, 400, "levels of arrays and objects in the body")
    max_json_items: int = _limit(2**16, 400, "arrays, objects and names in the body")
    max_json_commas: int = _limit(2**20, 400, "commas between values in the body")
    max_messages: int = _limit(4096, 400, "messages of a chat")
    max_content_parts: int = _limit(4096, 400, "parts of one message's content")
    max_prompts: int = _limit(1024, 400, "prompts of a completion request")
    max_num_choices: int = _limit(16384, 400, "choices per prompt (n)")
    max_total_choices: int = _limit(16384, 400, "choices of a request: prompts x n")
    max_stop_strings: int = _limit(4, 400, "stop strings")
    max_stop_chars: int = _limit(4096, 400, "characters of one stop string")
    max_bad_words: int = _limit(128, 400, "bad words")
    max_bad_word_chars: int = _limit(1024, 400, "characters of one bad word")
    max_logit_bias: int = _limit(1024, 400, "entries of logit_bias")
    max_scores: int = _limit(
        2**23, 400,
        "log-probabilities of a request: (tokens to score) x (scores a token), unless it is one "
        "choice with at most 20 a token",
    )  # fmt: skip
    max_cache_salt_chars: int = _limit(128, 400, "characters of cache_salt")
    max_request_id_chars: int = _limit(
        256, 400, "characters of request_id; a longer X-Request-Id header is not echoed"
    )


def limits_table(limits: RequestLimits | None = None) -> str:
    """The table in Markdown: name, value, what it counts, answer when it is exceeded, flag."""
    limits = limits or RequestLimits()
    lines = [
        "| limit | value | of what | answer above it | flag |",
        "| --- | --- | --- | --- | --- |",
    ]
    for field in dataclasses.fields(limits):
        row, value = field.metadata, getattr(limits, field.name)
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        flag = f"`{row['flag']}`" if row["flag"] else ""
        cells = (f"`{field.name}`", shown, row["what"], str(row["status"]), flag)
        lines.append("| " + " | ".join(cells).rstrip() + " |")
    return "\n".join(lines) + "\n"
