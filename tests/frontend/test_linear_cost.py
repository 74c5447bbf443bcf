"""S7, S21: work on text of a model or a user takes twice as long when the text is twice as long."""

import gc
import time
from collections.abc import Callable

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from headrace.frontend.chat_template import render_chat
from headrace.frontend.detokenizer import IncrementalDetokenizer
from headrace.frontend.special_spellings import spelling_set
from headrace.frontend.stop_strings import StopStrings
from headrace.frontend.tokenizers.tokenizer import Tokenizer, TokenizerFacts

SPECIALS = ["<|im_start|>", "<|im_end|>", "<image>", "<|a|>", "|>", "<unused0>", "<unused00>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% for part in m.content %}{{ part.text | trim }}{% endfor %}<|im_end|>\n{% endfor %}"
)


def make_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(word, special=True) for word in SPECIALS])
    return Tokenizer(backend, TokenizerFacts("test", chat_template=TEMPLATE))


TOKENIZER = make_tokenizer()


def render(text: str) -> None:
    render_chat(TOKENIZER, [{"role": "user", "content": text}])


def render_messages(text: str) -> None:
    """As many messages as the text has lines, the last of them continued."""
    render_chat(TOKENIZER, [{"role": "user", "content": line} for line in text.splitlines()])


def render_parts(text: str) -> None:
    parts = [{"type": "text", "text": line} for line in text.splitlines()]
    render_chat(TOKENIZER, [{"role": "user", "content": parts}])


def split(text: str) -> None:
    list(spelling_set(tuple(SPECIALS)).split(text))


def encode(text: str) -> None:
    TOKENIZER.encode(text)


def stop_scan(text: str) -> None:
    search = StopStrings(["<unused0>x", "<unused00>>", "a" * 1000 + "b", "<|im_start|>!"], False)
    for start in range(0, len(text), 7):
        search.push(text[start : start + 7], can_stop=True)
    search.flush()


def detokenize(text: str) -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    for token in text.encode():
        detokenizer.push(token)


TEXTS = {
    "placeholders": "<image>",
    "placeholders and text": "look <image> at <|im_start|> this\n",
    "unfinished spellings": "<|im_start",
    "brackets": "<",
    "overlapping": "<unused0<unused00>",
    "one letter": "a",
    "lines": "x<image>\n",
    "accents": "é<|ñ",
}
WORK = [render, render_parts, render_messages, split, encode, stop_scan, detokenize]


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("work", WORK)
def test_twice_the_text_takes_twice_the_time(work: Callable[[str], None], text: str) -> None:
    size = 30_000 // len(text)

    def seconds(repeats: int) -> float:
        data, best = text * repeats, float("inf")
        for _ in range(3):  # CPU time of this thread: what else runs does not count
            began = time.thread_time()
            work(data)
            best = min(best, time.thread_time() - began)
        return best

    work(text * size)
    gc.disable()
    try:
        ratios = (seconds(2 * size) / seconds(size) for _ in range(5))
        assert any(ratio < 2.5 for ratio in ratios)
    finally:
        gc.enable()
