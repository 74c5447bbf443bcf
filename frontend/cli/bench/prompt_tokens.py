"""Where prompts of an exact length come from: a tokenizer here, the server's, or plain words."""

import http.client
import json
import os
import random
import string
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from headrace.configs.errors import ConfigurationError, HeadraceError
from headrace.frontend.cli.bench.http_target import Target

NUM_POOL_WORDS = 3000
TIMEOUT_S = 60.0
PromptLike = str | list[int]


class PromptTokens(Protocol):
    """A vocabulary to make prompts of."""

    @property
    def ids(self) -> Sequence[int] | None:
        """Ordinary tokens; None if it knows only text."""
        ...

    def count(self, text: str) -> int | None:
        """Tokens of `text` without special ones; None if that is not known."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; only called if there are `ids`."""
        ...


class LocalTokens:
    """A tokenizer of this process: anything with `encode`, `decode`, `is_special`."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.ids: Sequence[int] = [i for i in range(vocab_size) if not tokenizer.is_special(i)]

    @classmethod
    def load(cls, name: str) -> "LocalTokens":
        """By path, alias or hub id. Raises HeadraceError."""
        from headrace.configs.model_files.cache_dir import cache_dir
        from headrace.configs.model_files.resolve import resolve_model
        from headrace.frontend.tokenizers import load_tokenizer

        path = Path(name) if Path(name).exists() else resolve_model(name)
        tokenizer = load_tokenizer(path, cache_dir(os.environ))
        return cls(tokenizer, tokenizer.vocab_size)

    def count(self, text: str) -> int | None:
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids))


class ServerTokens:
    """The server's `/tokenize` and `/detokenize`."""

    def __init__(self, target: Target, model: str) -> None:
        """Raises ConfigurationError if the server does not have them."""
        self._target = target
        self._model = model
        self.ids: Sequence[int] = sorted(set(self._encode(_pool_text())))

    def count(self, text: str) -> int | None:
        return len(self._encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        answer = self._post("/detokenize", {"tokens": list(ids)})
        return str(answer["prompt"])

    def _encode(self, text: str) -> list[int]:
        answer = self._post("/tokenize", {"prompt": text, "add_special_tokens": False})
        return [int(i) for i in answer["tokens"]]

    def _post(self, path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        target = self._target
        body = json.dumps({"model": self._model, **fields}).encode()
        connection: http.client.HTTPConnection
        if target.scheme == "https":
            connection = http.client.HTTPSConnection(
                target.host, target.port, timeout=TIMEOUT_S, context=target.ssl_context()
            )
        else:
            connection = http.client.HTTPConnection(target.host, target.port, timeout=TIMEOUT_S)
        try:
            headers = {"Content-Type": "application/json", **target.headers}
            connection.request("POST", target.prefix + path, body, headers)
            response = connection.getresponse()
            data = response.read()
            if response.status != 200:
                raise ConfigurationError(f"{target.url}{path} answered {response.status}")
            answer: dict[str, Any] = json.loads(data)
            return answer
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ConfigurationError(f"{target.url}{path} cannot be used: {error}") from error
        finally:
            connection.close()


class WordTokens:
    """No tokenizer at all: texts of short words, each about one token in most vocabularies."""

    ids: Sequence[int] | None = None
    words = ("the", "of", "and", "to", "in", "is", "was", "for", "on", "as", "with", "by")

    def count(self, text: str) -> int | None:
        return None

    def decode(self, ids: Sequence[int]) -> str:
        raise AssertionError("no ids to decode")


def random_prompt(tokens: PromptTokens, length: int, rng: random.Random) -> PromptLike:
    """A random prompt of `length` tokens: ids, or that many words where ids are not known."""
    if tokens.ids is None:
        return " ".join(rng.choice(WordTokens.words) for _ in range(length))
    return [rng.choice(tokens.ids) for _ in range(length)]


def open_tokens(
    tokenizer: str | None, skip: bool, target: Target, model: str, warn: Callable[[str], None]
) -> PromptTokens:
    """The best source there is; `warn` is told if prompt lengths will only be about right."""
    if skip:
        return WordTokens()
    if tokenizer is not None:
        return LocalTokens.load(tokenizer)
    try:
        return ServerTokens(target, model)
    except HeadraceError as error:
        warn(f"{error}; prompts are made of words, so their lengths are only about right "
             "(--tokenizer names a tokenizer)")  # fmt: skip
        return WordTokens()


def _pool_text() -> str:
    """Always the same made-up words: their tokens are the pool that random prompts draw from."""
    rng = random.Random(0)
    words = ("".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 7))) for _ in
             range(NUM_POOL_WORDS))  # fmt: skip
    return " ".join(words)
