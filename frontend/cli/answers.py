"""Where `chat` and `complete` get their text: a running server, or an engine of their own."""

import argparse
import contextlib
import http.client
import json
import logging
import os
import urllib.parse
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from headrace.configs.engine_args import EngineArgs
from headrace.configs.errors import ConfigurationError, RequestFailedError
from headrace.configs.sampling_params import RequestOutputKind, SamplingParams
from headrace.frontend.admission import RenderedPrompt
from headrace.frontend.cli.engine_options import (
    add_model_argument,
    engine_args_of,
    engine_options_given,
    log_to_stderr,
)
from headrace.frontend.render_params import ChatParams
from headrace.frontend.sampling_defaults import applied_defaults, default_max_tokens

CONNECT_TIMEOUT_S = 30.0
Message = dict[str, str]


@dataclass(frozen=True)
class AnswerOptions:
    """How to answer; None: the server's or the model's default."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None

    def given(self) -> dict[str, Any]:
        """What was given, by the names that requests and `SamplingParams` share."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class TextSource(Protocol):
    """A model that answers in pieces of text, as they come."""

    def chat(
        self, messages: list[Message], options: AnswerOptions
    ) -> Generator[str, None, None]: ...
    def complete(self, prompt: str, options: AnswerOptions) -> Generator[str, None, None]: ...


def add_source_options(
    parser: argparse.ArgumentParser, default_max_tokens: int | None = None
) -> None:
    """Add the options that `chat` and `complete` share."""
    shown = default_max_tokens or "what fits"
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=default_max_tokens,
        help=f"length limit of an answer (default: {shown})",
    )
    for flag, kind, what in (
        ("--temperature", float, "0 always takes the likeliest token"),
        ("--top-p", float, "choose among the likeliest tokens that have this probability together"),
        ("--top-k", int, "choose among this many of the likeliest tokens"),
        ("--min-p", float, "leave out tokens less likely than this share of the likeliest"),
        ("--seed", int, "the same seed gives the same answers"),
    ):
        parser.add_argument(flag, type=kind, default=None, help=what)
    parser.add_argument("--stats", action="store_true", help="print the speed of each answer")
    add_model_argument(parser)
    client = parser.add_argument_group("server")
    client.add_argument("--url", default=None, help="a running server, as http://HOST:PORT/v1")
    client.add_argument("--model-name", default=None, help="model to ask for (default: the first)")
    client.add_argument(
        "--api-key", default=None, help="key for the server (default: the variable OPENAI_API_KEY)"
    )
    EngineArgs.add_cli_args(parser)


@contextlib.contextmanager
def open_source(args: argparse.Namespace) -> Iterator[TextSource]:
    """The source that `args` choose; an engine of our own ends with the block."""
    if args.url is not None:
        given = engine_options_given(args)
        if given:
            raise ConfigurationError(
                f"{given[0]} is an option of an engine, but --url talks to a server that has one; "
                "leave it out, or give it to `headrace serve`"
            )
        key = args.api_key or os.environ.get("OPENAI_API_KEY") or "EMPTY"
        yield RemoteModel(args.url, key, args.model_name or args.model_tag)
        return
    log_to_stderr(logging.WARNING)
    with contextlib.closing(LocalModel(engine_args_of(args, EngineArgs))) as model:
        yield model


def answer_options(args: argparse.Namespace) -> AnswerOptions:
    """The options of a command line that has `add_source_options`; checked before a model loads."""
    options = AnswerOptions(
        args.max_tokens, args.temperature, args.top_p, args.top_k, args.min_p, args.seed
    )
    try:
        SamplingParams(**options.given())
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    return options


class RemoteModel:
    """A model behind an OpenAI-compatible server."""

    def __init__(self, url: str, api_key: str, model_name: str | None) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError(f"--url must look like http://HOST:PORT/v1, got {url}")
        self._parts = parts
        self._headers = {
            "Authorization": f"Bearer {api_key}",
            "Content-Type": "application/json",
        }
        self._model_name = model_name or self._first_model()

    def chat(self, messages: list[Message], options: AnswerOptions) -> Generator[str, None, None]:
        for choice in self._stream("/chat/completions", {"messages": messages}, options):
            yield choice["delta"].get("content") or ""

    def complete(self, prompt: str, options: AnswerOptions) -> Generator[str, None, None]:
        for choice in self._stream("/completions", {"prompt": prompt}, options):
            yield choice["text"]

    def _first_model(self) -> str:
        with self._open("GET", "/models", None) as response:
            return str(json.loads(response.read())["data"][0]["id"])

    def _stream(
        self, path: str, body: dict[str, Any], options: AnswerOptions
    ) -> Iterator[dict[str, Any]]:
        """The choices in the events of a stream."""
        body = {"model": self._model_name, "stream": True, **body, **options.given()}
        with self._open("POST", path, json.dumps(body).encode()) as response:
            for line in response:
                data = line.strip().removeprefix(b"data: ")
                if not line.startswith(b"data: ") or data == b"[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise RequestFailedError(str(event["error"]["message"]))
                yield from event["choices"]

    @contextlib.contextmanager
    def _open(
        self, method: str, path: str, body: bytes | None
    ) -> Iterator[http.client.HTTPResponse]:
        parts = self._parts
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        connection = kind(parts.hostname or "", parts.port, timeout=CONNECT_TIMEOUT_S)
        try:
            connection.connect()
            connection.sock.settimeout(None)  # a long prompt may take its time
            connection.request(method, parts.path.rstrip("/") + path, body, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise RequestFailedError(_refusal(response))
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise RequestFailedError(
                f"cannot talk to {parts.scheme}://{parts.netloc}: {error or type(error).__name__}; "
                "is the server running there?"
            ) from error
        finally:
            connection.close()


class LocalModel:
    """An engine of our own, driven one answer at a time."""

    def __init__(self, args: EngineArgs) -> None:
        from headrace.frontend.llm_engine import LLMEngine  # here, so that help is quick

        self._engine = LLMEngine.from_engine_args(args)

    def close(self) -> None:
        """End the engine."""
        self._engine.close()

    def chat(self, messages: list[Message], options: AnswerOptions) -> Generator[str, None, None]:
        _, (prompt,) = self._engine.renderer.render_chat([messages], ChatParams())
        return self._pieces(prompt, options)

    def complete(self, prompt: str, options: AnswerOptions) -> Generator[str, None, None]:
        (rendered,) = self._engine.renderer.render_cmpl([prompt])
        return self._pieces(rendered, options)

    def _pieces(self, prompt: RenderedPrompt, options: AnswerOptions) -> Generator[str, None, None]:
        self._engine.add_rendered("cli", prompt, self._params(options))
        try:
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    yield "".join(choice.text for choice in output.outputs)
        finally:
            self._engine.abort_request("cli")

    def _params(self, options: AnswerOptions) -> SamplingParams:
        """The options over the model's defaults; without a length limit, what fits."""
        defaults = self._engine.model_config.default_sampling_params
        fields = {
            **applied_defaults(defaults),
            "max_tokens": default_max_tokens(defaults),
            **options.given(),
        }
        try:
            return SamplingParams(**fields, output_kind=RequestOutputKind.DELTA)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error


def _refusal(response: http.client.HTTPResponse) -> str:
    """What a server said when it refused."""
    try:
        error = json.loads(response.read())["error"]
    except (ValueError, KeyError, TypeError):
        error = response.reason
    message = error["message"] if isinstance(error, dict) else error
    return f"the server answered {response.status}: {message}"
