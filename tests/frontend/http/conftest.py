"""A scripted engine with the surface of the real one, and clients on the application over it."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest
import uvicorn

from headrace.configs.config import ModelConfig
from headrace.configs.errors import EngineDeadError, HeadraceError
from headrace.configs.sampling_params import RequestOutputKind, SamplingParams
from headrace.engine_core.messages import EngineStats, Ready
from headrace.frontend.admission import Admission, RenderedPrompt
from headrace.frontend.chat_template import render_chat
from headrace.frontend.http.app import create_app
from headrace.frontend.http.server_state import ServerState
from headrace.frontend.outputs import CompletionOutput, Logprob, RequestOutput

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

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""


class ScriptedRenderer:
    def __init__(self, tokenizer: ByteTokenizer) -> None:
        self._tokenizer = tokenizer
        self.calls: list[dict[str, Any]] = []

    async def render_completion(
        self, prompt: str | list[int], add_special_tokens: bool = True
    ) -> RenderedPrompt:
        if not isinstance(prompt, str):
            return RenderedPrompt(None, list(prompt))
        ids = self._tokenizer.encode(prompt, add_special_tokens)
        warnings = ("the start token is there twice",) if ids[:2] == [256, 256] else ()
        return RenderedPrompt(prompt, ids, warnings)

    async def render_chat(self, messages: Any, **options: Any) -> RenderedPrompt:
        self.calls.append(options)
        rendered = render_chat(self._tokenizer, messages, **options)
        return RenderedPrompt(rendered.text, rendered.token_ids)


class ScriptedEngine:
    """Answers every prompt with the bytes of `script`, over and over, then EOS or the length limit.

    `hold`: nothing comes before it is set. `fail_after`: the request fails after that many tokens.
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
        self.last_logprob = -0.5
        self.start_gate: asyncio.Event | None = None
        self.start_failure: HeadraceError | None = None
        self.died = asyncio.Event()
        self.is_stopped = False
        self._admission = Admission(
            self.model_config,
            Ready(16, 16, 4 * MAX_MODEL_LEN, "contract", {}, {}, 1, 1),
        )

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

    async def generate(
        self, prompt: RenderedPrompt, params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        request = self._admission.admit(prompt.token_ids, params, arrival_time=0.0)
        params = request.sampling_params
        self.seen.append((params, {**options, "request_id": request_id}, prompt))
        self.num_requests += 1
        finished = False
        try:
            if self.hold is not None:
                await self.hold.wait()
            choices = [self._choice(index, params) for index in range(params.n)]
            if params.output_kind is RequestOutputKind.FINAL_ONLY:
                await asyncio.sleep(self.delay_s * len(choices[0].token_ids))
                if self.fail_after is not None:
                    raise self.failure
                finished = True
                yield self._output(request_id, prompt, choices, True)
                return
            for position in range(len(choices[0].token_ids)):
                if position == self.fail_after:
                    raise self.failure
                await asyncio.sleep(self.delay_s)
                finished = position == len(choices[0].token_ids) - 1
                yield self._output(
                    request_id, prompt, [_delta(c, position) for c in choices], finished
                )
        except HeadraceError:
            finished = True
            raise
        finally:
            self.num_requests -= 1
            self.num_aborted += not finished

    def _output(
        self, request_id: str, prompt: RenderedPrompt, outputs: list[CompletionOutput], done: bool
    ) -> RequestOutput:
        return RequestOutput(
            request_id, prompt.text, prompt.token_ids, None, outputs, done, num_cached_tokens=2
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
        if params.logprobs is not None:
            logprobs = [self._logprobs(token, params.logprobs) for token in ids]
        text = bytes(token for token in ids if token < 256).decode()
        return CompletionOutput(
            index, text, ids, None, logprobs, "stop" if ended else "length", None
        )

    def _logprobs(self, token: int, num: int) -> dict[int, Logprob]:
        entries = {token: Logprob(self.last_logprob, 2, chr(token))}
        rivals = [other for other in (65, 66, 67, 68) if other != token][:num]
        for k, other in enumerate(rivals):
            rank = k + 1 if k == 0 else k + 2
            entries[other] = Logprob(-float(k) if k else float("-inf"), rank, chr(other))
        return entries


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
        app = create_app(ServerState(engine), keys)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await work(client)

    return asyncio.run(go())


class LiveServer:
    """The application over a real uvicorn on a loopback port, in a thread of its own."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine
        self.state = ServerState(engine)
        app = create_app(self.state)
        self._server = uvicorn.Server(
            uvicorn.Config(app, port=0, log_config=None, lifespan="off", ws="none")
        )
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    @property
    def port(self) -> int:
        return int(self._server.servers[0].sockets[0].getsockname()[1])

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


@pytest.fixture
def live_server() -> Iterator[Callable[[ScriptedEngine], LiveServer]]:
    """`live_server(engine)` serves until the end of the test."""
    with contextlib.ExitStack() as stack:
        yield lambda engine: stack.enter_context(LiveServer(engine))


@pytest.fixture
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
