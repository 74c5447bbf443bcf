"""A scripted engine with the surface of the real one, and clients on the application over it."""

import asyncio
import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any

import httpx
import pytest
import uvicorn

from headrace.configs.config import EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from headrace.configs.errors import EngineDeadError, HeadraceError
from headrace.configs.sampling_params import RequestOutputKind, SamplingParams
from headrace.engine_core.messages import EngineStats, Ready
from headrace.frontend.admission import Admission, RenderedPrompt
from headrace.frontend.chat_template import render_chat
from headrace.frontend.http.app import create_app
from headrace.frontend.http.listener import ServerOptions
from headrace.frontend.http.server import make_uvicorn_config
from headrace.frontend.http.server_state import ServerState
from headrace.frontend.output_stream import OutputStream
from headrace.frontend.outputs import CompletionOutput, Logprob, RequestOutput
from headrace.frontend.render_params import ChatParams, TokenizeParams
from headrace.frontend.stats import StatLoggerBase

VOCAB_SIZE = 300  # bytes, specials, and ids that the tokenizer does not know
MAX_MODEL_LEN = 64
EOS = 257
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class ByteTokenizer:
    """Every byte is a token; two specials behind them."""

    special_tokens = {"<s>": 256, "<eos>": EOS}  # noqa: RUF012
    bos_token, eos_token = "<s>", "<eos>"
    max_token_id = EOS
    chat_template: str | None = TEMPLATE

    def encode(
        self, text: str, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        ids = [256] if add_special_tokens else []
        while text:
            spelled = next((s for s in self.special_tokens if text.startswith(s)), None)
            if parse_special and spelled:
                ids.append(self.special_tokens[spelled])
                text = text[len(spelled) :]
            else:
                ids += text[0].encode()
                text = text[1:]
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        names = {} if skip_special_tokens else {v: k for k, v in self.special_tokens.items()}
        data = [names[i].encode() if i in names else self.token_bytes(i) for i in ids]
        return b"".join(data).decode("utf-8", "replace")

    def id_to_token(self, token_id: int) -> str | None:
        return self.decode([token_id], skip_special_tokens=False) or None

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""


class ScriptedRenderer:
    """The surface of `Renderer`. `calls` are the `ChatParams` seen."""

    default_cmpl_tok_params = TokenizeParams(MAX_MODEL_LEN)
    default_chat_tok_params = TokenizeParams(MAX_MODEL_LEN, add_special_tokens=False)

    def __init__(self, tokenizer: ByteTokenizer) -> None:
        self._tokenizer = tokenizer
        self.calls: list[ChatParams] = []

    async def render_cmpl_async(
        self,
        prompts: list[dict[str, Any]],
        tok_params: TokenizeParams | None = None,
        *,
        prompt_extras: dict[str, Any] | None = None,
    ) -> list[RenderedPrompt]:
        params = tok_params or self.default_cmpl_tok_params
        return [self._tokenize(prompt, params, prompt_extras or {}) for prompt in prompts]

    async def render_chat_async(
        self,
        conversations: list[list[dict[str, Any]]],
        chat_params: ChatParams,
        tok_params: TokenizeParams | None = None,
        *,
        prompt_extras: dict[str, Any] | None = None,
    ) -> tuple[list[list[dict[str, Any]]], list[RenderedPrompt]]:
        self.calls.append(chat_params)
        params = tok_params or self.default_chat_tok_params
        prompts = []
        for messages in conversations:
            rendered = render_chat(self._tokenizer, messages, chat_params)
            prompts.append(
                self._finish(rendered.token_ids, rendered.text, params, prompt_extras or {})
            )
        return conversations, prompts

    def _tokenize(
        self, prompt: dict[str, Any], params: TokenizeParams, extras: dict[str, Any]
    ) -> RenderedPrompt:
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if ids is None:
            ids = self._tokenizer.encode(text, params.add_special_tokens)
        elif params.needs_detokenization:
            text = self._tokenizer.decode(ids)
        return self._finish(ids, text, params, extras)

    def _finish(
        self, ids: list[int], text: str | None, params: TokenizeParams, extras: dict[str, Any]
    ) -> RenderedPrompt:
        keep = params.truncate_prompt_tokens
        if keep is not None:
            ids = ids[:keep] if params.truncation_side == "right" else ids[-keep:]
        warnings = ("the start token is there twice",) if ids[:2] == [256, 256] else ()
        return RenderedPrompt(text, list(ids), warnings, extras.get("cache_salt"))


class ScriptedEngine:
    """Answers every prompt with the bytes of `script`, over and over, then EOS or the length limit.

    `hold`: nothing comes before it is set. `fail_after`: the request fails after that many tokens.
    `options`: of the server over it.
    """

    def __init__(self, script: str = "Hello!", delay_s: float = 0.0) -> None:
        self.state = "ready"
        self.tokenizer = ByteTokenizer()
        self.renderer = ScriptedRenderer(self.tokenizer)
        self.model_config = ModelConfig(
            model="org/tiny", path="p", tokenizer_path="p", served_model_names=("tiny", "alias"),
            architecture="LlamaForCausalLM", hf_config={}, dtype="float32",
            max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE, eos_token_id=EOS,
        )  # fmt: skip
        self.script = script
        self.delay_s = delay_s
        self.hold: asyncio.Event | None = None
        self.fail_after: int | None = None
        self.failure: HeadraceError = EngineDeadError("the engine core is gone")
        self.seen: list[tuple[SamplingParams, dict[str, Any], RenderedPrompt]] = []
        self.num_aborted = 0
        self.num_requests = 0
        self.is_up = True
        self.calls: list[tuple[str, dict[str, Any]]] = []  # of utilities and workers
        self.answers: dict[str, Any] = {}
        self._running: dict[OutputStream, asyncio.Task[None]] = {}
        self.last_logprob = -0.5
        self.start_gate: asyncio.Event | None = None
        self.start_failure: HeadraceError | None = None
        self.died = asyncio.Event()
        self.is_stopped = False
        self.options = ServerOptions()
        self.stat_loggers: dict[str, StatLoggerBase] = {}
        self.scheduler_config = SchedulerConfig()
        self.parallel_config = ParallelConfig()
        self.pinned: int | None = None  # the rank that the last request asked for
        self.configure()

    def configure(self, **fields: Any) -> None:
        """Change the model's configuration."""
        self.model_config = dataclasses.replace(self.model_config, **fields)
        ready = Ready(16, 16, 4 * MAX_MODEL_LEN, "contract", {}, {}, 1, 1)
        self._admission = Admission(self.model_config, ready, self.tokenizer)

    @property
    def config(self) -> EngineConfig:
        return EngineConfig(
            self.model_config,
            scheduler_config=self.scheduler_config,
            parallel_config=self.parallel_config,
        )

    async def call(self, method: str, kwargs: Mapping[str, Any] | None = None) -> Any:
        self.calls.append((method, dict(kwargs or {})))
        answer = self.answers.get(method)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        return list(await self.call(method, {"timeout": timeout, "args": args, **(kwargs or {})}))

    async def start(self) -> None:
        if self.start_gate is not None:
            self.state = "starting"
            await self.start_gate.wait()
        if self.start_failure is not None:
            self.state = "dead"
            raise self.start_failure
        self.state = "ready"

    async def wait_dead(self) -> HeadraceError:
        await self.died.wait()
        self.state = "dead"
        return self.failure

    async def stop(self) -> None:
        self.is_stopped = True

    def progress(self) -> dict[str, float | int]:
        return {"step": 7, "age_s": 0.0, "running": self.num_requests, "waiting": 0}

    def stats(self) -> EngineStats | None:
        if self.state == "starting":
            return None
        return EngineStats(step=7, num_running=self.num_requests, num_free_blocks=12, num_blocks=16)

    def submit(
        self, prompt: RenderedPrompt, params: SamplingParams, request_id: str, **options: Any
    ) -> OutputStream:
        self.pinned = options.pop("data_parallel_rank")
        stream = OutputStream(request_id, params.output_kind is RequestOutputKind.DELTA)
        outputs = self._generate(prompt, params, request_id, **options)
        self._running[stream] = asyncio.create_task(self._bring(outputs, stream))
        return stream

    def release(self, stream: OutputStream) -> None:
        self._running.pop(stream).cancel()

    async def _bring(
        self, outputs: AsyncGenerator[RequestOutput, None], stream: OutputStream
    ) -> None:
        try:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    stream.put(output)
                    while stream.has_news:  # one by one, so that tests can count events
                        await asyncio.sleep(0)
        except Exception as error:
            stream.fail(error)

    async def _generate(
        self, prompt: RenderedPrompt, params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        request = self._admission.admit(
            prompt.token_ids,
            params,
            arrival_time=0.0,
            priority=options["priority"],
            cache_salt=prompt.cache_salt,
            ignores_unused_priority=True,
        )
        params = request.sampling_params
        self.seen.append((params, {**options, "request_id": request_id}, prompt))
        self.num_requests += 1
        finished = False
        try:
            if self.hold is not None:
                await self.hold.wait()
            choices = [self._choice(index, params) for index in range(params.num_returned)]
            if params.output_kind is RequestOutputKind.FINAL_ONLY:
                await asyncio.sleep(self.delay_s * len(choices[0].token_ids))
                if self.fail_after is not None:
                    raise self.failure
                finished = True
                yield self._output(request_id, prompt, choices, True, params)
                return
            for position in range(len(choices[0].token_ids)):
                if position == self.fail_after:
                    raise self.failure
                await asyncio.sleep(self.delay_s)
                finished = position == len(choices[0].token_ids) - 1
                shown = params if position == 0 else None
                yield self._output(
                    request_id, prompt, [_delta(c, position) for c in choices], finished, shown
                )
        except HeadraceError:
            finished = True
            raise
        finally:
            self.num_requests -= 1
            self.num_aborted += not finished

    def _output(
        self,
        request_id: str,
        prompt: RenderedPrompt,
        outputs: list[CompletionOutput],
        done: bool,
        params: SamplingParams | None,
    ) -> RequestOutput:
        """`params`: of the request, where this output has the scores of the prompt."""
        ids = prompt.token_ids
        scores: Any = None
        if params is not None and params.prompt_logprobs is not None:
            scores = [None, *(self._logprobs(token, params.prompt_logprobs) for token in ids[1:])]
        return RequestOutput(
            request_id, prompt.text, ids, scores, outputs, done, num_cached_tokens=2
        )

    def _choice(self, index: int, params: SamplingParams) -> CompletionOutput:
        assert params.max_tokens is not None
        data = list(self.script.encode())
        if params.ignore_eos:
            ids = (data * params.max_tokens)[: params.max_tokens]
        else:
            ids = [*data, EOS][: params.max_tokens]
        ended = ids[-1:] == [EOS]
        logprobs = None
        if params.logprobs is not None and params.returns_logprobs:
            logprobs = [self._logprobs(token, params.logprobs) for token in ids]
        text = bytes(token for token in ids if token < 256).decode()
        return CompletionOutput(
            index, text, ids, None, logprobs, "stop" if ended else "length", None
        )

    def _logprobs(self, token: int, num: int) -> dict[int, Logprob]:
        """The token, always second, and the others among the likeliest `num`."""
        entries = {token: Logprob(self.last_logprob, 2, self._text(token))}
        rivals = [other for other in (65, 66, 67, 68) if other != token]
        for rank, other in zip((1, 3, 4), rivals, strict=False):
            if rank <= num:
                value = float("-inf") if rank == 1 else -float(rank - 2)
                entries[other] = Logprob(value, rank, self._text(other))
        return entries

    def _text(self, token: int) -> str:
        return self.tokenizer.token_bytes(token).decode("utf-8", "replace")


def _delta(choice: CompletionOutput, position: int) -> CompletionOutput:
    token = choice.token_ids[position]
    is_last = position == len(choice.token_ids) - 1
    return CompletionOutput(
        choice.index,
        chr(token) if token < 256 else "",
        [token],
        None,
        choice.logprobs and [choice.logprobs[position]],
        choice.finish_reason if is_last else None,
    )


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def call(engine: ScriptedEngine) -> Callable[..., httpx.Response]:
    """`call(method, path, **httpx_options)` against a fresh application over `engine`."""

    def send(method: str, path: str, keys: tuple[str, ...] = (), **options: Any) -> httpx.Response:
        async def go(client: httpx.AsyncClient) -> httpx.Response:
            return await client.request(method, path, **options)

        return with_client(engine, go, keys)

    return send


@pytest.fixture
def post(call: Callable[..., httpx.Response]) -> Callable[..., httpx.Response]:
    """`post(path, body)`: a JSON request to a generation route."""

    def send(path: str, body: Any, **options: Any) -> httpx.Response:
        return call("POST", f"/v1/{path}", json=body, **options)

    return send


@pytest.fixture
def concurrently(engine: ScriptedEngine) -> Callable[..., Any]:
    """`concurrently(work)` runs `await work(client)` on an application over `engine`."""
    return lambda work, keys=(): with_client(engine, work, keys)


def with_client(
    engine: ScriptedEngine,
    work: Callable[[httpx.AsyncClient], Awaitable[Any]],
    keys: tuple[str, ...] = (),
) -> Any:
    async def go() -> Any:
        options = dataclasses.replace(engine.options, api_keys=keys)
        app = create_app(ServerState(engine, options))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await work(client)

    return asyncio.run(go())


class LiveServer:
    """The application over a real uvicorn on a loopback port, in a thread of its own."""

    def __init__(self, engine: ScriptedEngine, listener: socket.socket | None = None) -> None:
        self.engine = engine
        self.state = ServerState(engine, engine.options)
        app = create_app(self.state)
        self._listener = listener or socket.create_server(("127.0.0.1", 0), backlog=100)
        if listener is None:
            self.port = int(self._listener.getsockname()[1])
        self._server = uvicorn.Server(make_uvicorn_config(app, engine.options))
        self._thread = threading.Thread(
            target=self._server.run, args=([self._listener],), daemon=True
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "LiveServer":
        self._thread.start()
        wait_until(lambda: self._server.started)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(10)
        self._listener.close()


@pytest.fixture(scope="module")
def live_server() -> Iterator[Callable[..., LiveServer]]:
    """`live_server(engine)` serves until the end of the module's tests."""
    with contextlib.ExitStack() as stack:
        yield lambda engine, *listener: stack.enter_context(LiveServer(engine, *listener))


@pytest.fixture(scope="session")
def scripted() -> type[ScriptedEngine]:
    return ScriptedEngine


@pytest.fixture
def until() -> Callable[..., float]:
    return wait_until


def wait_until(condition: Callable[[], object], timeout_s: float = 5.0) -> float:
    """Seconds until `condition()` became true; fails after `timeout_s`."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > timeout_s:
            pytest.fail("the condition did not become true")
        time.sleep(0.005)
    return time.monotonic() - began
