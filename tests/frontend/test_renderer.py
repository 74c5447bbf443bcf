"""The renderer: forms of prompts, tokenizing, messages, both ways; the micro-batching tokenizer."""

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from headrace.configs.config import ModelConfig
from headrace.configs.errors import InvalidRequestError, UnsupportedFeatureError
from headrace.frontend.admission import RenderedPrompt
from headrace.frontend.batched_tokenizer import MAX_BATCH_SIZE, BatchedTokenizer
from headrace.frontend.render_params import ChatParams, TokenizeParams
from headrace.frontend.renderer import Renderer
from headrace.frontend.tokenizers.tokenizer import Tokenizer, TokenizerFacts

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}:{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ mood }}{{ documents | tojson }}"
    "{% if add_generation_prompt %}</s>{% endif %}"
)
WINDOW = 64


def make_backend() -> tokenizers.Tokenizer:
    """Bytes, with <s> before and </s> behind a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(word, special=True) for word in ("<s>", "</s>", "<pad>")]
    )
    ids = [(word, backend.token_to_id(word)) for word in ("<s>", "</s>")]
    backend.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    return backend


def make_tokenizer(template: str | None = TEMPLATE, has_pad: bool = True) -> Tokenizer:
    backend = make_backend()
    bos, eos, pad = map(backend.token_to_id, ("<s>", "</s>", "<pad>"))
    return Tokenizer(backend, TokenizerFacts("t", bos, eos, template, pad if has_pad else None))


def make_renderer(tokenizer: Tokenizer | None, **fields: Any) -> Renderer:
    model = ModelConfig(
        "m", "m", "m", ("m",), "LlamaForCausalLM", {}, "float32", WINDOW, 300, 2, **fields
    )
    return Renderer(model, tokenizer)


@pytest.fixture
def renderer() -> Renderer:
    return make_renderer(make_tokenizer())


def both_ways(
    renderer: Renderer, prompts: Sequence[Any], params: TokenizeParams | None = None, **more: Any
) -> list[RenderedPrompt]:
    """`render_cmpl`, checked against `render_cmpl_async`: the same results or the same error."""
    results: list[Any] = []
    for render in (
        lambda: renderer.render_cmpl(prompts, params, **more),
        lambda: asyncio.run(renderer.render_cmpl_async(prompts, params, **more)),
    ):
        before = time.time()
        try:
            rendered = render()
        except Exception as error:
            results.append((type(error), str(error)))
            raised = error
            continue
        times = {prompt.arrival_time for prompt in rendered}
        assert len(times) == 1 and before <= times.pop() <= time.time()  # type: ignore[operator]
        results.append([_without_time(prompt) for prompt in rendered])
    assert results[0] == results[1]
    if isinstance(results[0], tuple):
        raise raised
    return results[0]  # type: ignore[no-any-return]


def _without_time(prompt: RenderedPrompt) -> RenderedPrompt:
    return RenderedPrompt(prompt.text, prompt.token_ids, prompt.warnings, prompt.cache_salt)


def ids_of(text: str) -> list[int]:
    return make_tokenizer().encode(text, add_special_tokens=False)


BOS, EOS, PAD = ids_of("<s>")[0], ids_of("</s>")[0], ids_of("<pad>")[0]


# Forms of prompts


def test_forms_of_prompts(renderer: Renderer) -> None:
    ids = [BOS, *ids_of("abc"), EOS]
    forms = ["abc", {"prompt": "abc"}, [1, 2], {"prompt_token_ids": [1, 2]}]
    forms += [{"prompt_token_ids": [1, 2], "prompt": "x", "cache_salt": "s"}, (1, 2)]
    forms += [{"prompt": "abc", "cache_salt": "s", "multi_modal_data": {}, "other": 3}]
    forms += [{"prompt": "abc", "cache_salt": "", "multi_modal_uuids": {"image": "u"}}]
    assert both_ways(renderer, forms) == [
        RenderedPrompt("abc", ids), RenderedPrompt("abc", ids), RenderedPrompt(None, [1, 2]),
        RenderedPrompt(None, [1, 2]), RenderedPrompt("x", [1, 2], cache_salt="s"),
        RenderedPrompt(None, [1, 2]), RenderedPrompt("abc", ids, cache_salt="s"),
        RenderedPrompt("abc", ids),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "error", "said"),
    [
        ({"prompt_embeds": [[1.0]]}, UnsupportedFeatureError, "prompt_embeds"),
        (b"AAAA", UnsupportedFeatureError, "embeddings"),
        ({"encoder_prompt": "a", "decoder_prompt": None}, UnsupportedFeatureError, "encoder"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, UnsupportedFeatureError, "text only"),
        ({"prompt": "a", "mm_processor_kwargs": {"x": 1}}, UnsupportedFeatureError, "mm_processor"),
        ({"prompt_token_ids": [1], "token_type_ids": [0]}, UnsupportedFeatureError, "token_type"),
        ({}, InvalidRequestError, "needs 'prompt'"),
        ({"prompt": 3}, InvalidRequestError, "must be a str"),
        ({"prompt_token_ids": "abc"}, InvalidRequestError, "list of ints"),
        ({"prompt": "a", "cache_salt": 3}, InvalidRequestError, "cache_salt"),
        (3, TypeError, "got int"),
        (None, TypeError, "got NoneType"),
        (["a", "b"], TypeError, "list of str"),
        ([[1], [2]], TypeError, "list of list"),
        ("a\ud800", InvalidRequestError, "U\\+D800"),
    ],
)
def test_bad_prompts(renderer: Renderer, prompt: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        both_ways(renderer, ["fine", prompt])


def test_lists_of_prompts(renderer: Renderer) -> None:
    with pytest.raises(ValueError, match="at least one prompt"):
        both_ways(renderer, [])
    with pytest.raises(TypeError, match="must be a list"):
        both_ways(renderer, "abc")  # type: ignore[arg-type]
    texts = [f"{i}" for i in range(100)]
    assert [p.text for p in both_ways(renderer, texts)] == texts


def test_prompts_of_the_caller_stay(renderer: Renderer) -> None:
    prompts = [{"prompt": "a"}, {"prompt_token_ids": [1]}]
    params = TokenizeParams(WINDOW, needs_detokenization=True)
    both_ways(renderer, prompts, params, prompt_extras={"cache_salt": "x"})
    assert prompts == [{"prompt": "a"}, {"prompt_token_ids": [1]}]


def test_extras_go_first(renderer: Renderer) -> None:
    prompts = [{"prompt": "a", "cache_salt": "old"}, [1]]
    rendered = both_ways(renderer, prompts, prompt_extras={"cache_salt": "new"})
    assert [prompt.cache_salt for prompt in rendered] == ["new", "new"]
    assert both_ways(renderer, prompts, prompt_extras={})[0].cache_salt == "old"
    with pytest.raises(UnsupportedFeatureError, match="multi_modal_data"):
        both_ways(renderer, ["a"], prompt_extras={"multi_modal_data": {"image": 1}})


def test_a_doubled_start_token_is_told(renderer: Renderer) -> None:
    (rendered,) = both_ways(renderer, ["<s>a"])
    assert rendered.token_ids[:2] == [BOS, BOS] and "'<s>' twice" in rendered.warnings[0]
    (rendered,) = both_ways(renderer, ["<s>a"], TokenizeParams(WINDOW, add_special_tokens=False))
    assert rendered.token_ids == [BOS, *ids_of("a")] and rendered.warnings == ()


# Tokenizing parameters


def test_default_parameters(renderer: Renderer) -> None:
    assert renderer.default_cmpl_tok_params == TokenizeParams(WINDOW)
    assert renderer.default_chat_tok_params == TokenizeParams(WINDOW, add_special_tokens=False)
    assert renderer.default_cmpl_tok_params is renderer.default_cmpl_tok_params


def test_parameters_that_contradict_each_other() -> None:
    with pytest.raises(InvalidRequestError, match="max_tokens=11 is above max_model_len=10") as bad:
        TokenizeParams(
            10, 11, max_output_tokens_param="max_tokens", max_total_tokens_param="max_model_len"
        )
    assert bad.value.parameter == "max_tokens"
    with pytest.raises(InvalidRequestError, match=r"truncate_prompt_tokens=9 .* input limit 8"):
        TokenizeParams(10, 2, truncate_prompt_tokens=9)
    assert TokenizeParams(10, 2, truncate_prompt_tokens=8).max_input_tokens == 8
    assert TokenizeParams(None, 2, truncate_prompt_tokens=8).max_input_tokens is None


def test_length(renderer: Renderer) -> None:
    """A10: nothing is cut unless asked for, and the numbers are in the message."""
    for prompt in ([1] * (WINDOW + 1), "a" * (WINDOW - 1)):
        with pytest.raises(
            InvalidRequestError,
            match=rf"has {WINDOW + 1} tokens.* at most {WINDOW - 1} fit .*{WINDOW}",
        ):
            both_ways(renderer, [prompt])
    for prompt in ([1] * WINDOW, "a" * (WINDOW - 2)):
        (rendered,) = both_ways(renderer, [prompt])
        assert len(rendered.token_ids) == WINDOW
    with pytest.raises(
        InvalidRequestError, match=r"at most 60 fit .*64, 4 output tokens requested"
    ):
        both_ways(renderer, [[1] * 61], TokenizeParams(WINDOW, 4))
    assert len(both_ways(renderer, [[1] * 999], TokenizeParams(None))[0].token_ids) == 999


def test_a_hopeless_text_is_not_even_encoded(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert renderer.get_tokenizer().max_chars_per_token == len("<pad>")
    monkeypatch.setattr(Tokenizer, "encode", None)
    with pytest.raises(InvalidRequestError, match=r"321 characters.*at most 320"):
        both_ways(renderer, ["a" * 321])


def test_special_tokens_and_lower_case(renderer: Renderer) -> None:
    params = TokenizeParams(WINDOW, add_special_tokens=False, do_lower_case=True)
    assert both_ways(renderer, ["AbC"], params) == [RenderedPrompt("AbC", ids_of("abc"))]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("size", [3, 4, 5, 7, 8, 9])
def test_truncated_text_is_what_transformers_makes(side: str, special: bool, size: int) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_object=make_backend(), truncation_side=side
    )
    text = "abcdefg"
    expected = reference.encode(text, add_special_tokens=special, truncation=True, max_length=size)
    params = TokenizeParams(
        WINDOW,
        truncate_prompt_tokens=size,
        truncation_side=side,
        add_special_tokens=special,  # type: ignore[arg-type]
    )
    (rendered,) = both_ways(make_renderer(make_tokenizer()), [text], params)
    assert rendered.token_ids == expected and rendered.text == text


def test_truncated_ids(renderer: Renderer) -> None:
    ids = list(range(20))
    for size, side, expected in (
        (5, "left", ids[-5:]), (5, "right", ids[:5]), (0, "left", []), (30, "left", ids),
        (-1, "left", ids[-10:]), (-1, "right", ids[:10]),
    ):  # fmt: skip
        total = 32 if size > 0 else 10
        params = TokenizeParams(total, truncate_prompt_tokens=size, truncation_side=side)  # type: ignore[arg-type]
        assert both_ways(renderer, [ids], params)[0].token_ids == expected


def test_padding(renderer: Renderer) -> None:
    params = TokenizeParams(10, pad_prompt_tokens=4)
    assert both_ways(renderer, [[1, 2]], params)[0].token_ids == [1, 2, PAD, PAD]
    assert both_ways(renderer, ["abcdef"], params)[0].token_ids == [BOS, *ids_of("abcdef"), EOS]
    params = TokenizeParams(10, 3, pad_prompt_tokens=-1)
    assert both_ways(renderer, [[1]], params)[0].token_ids == [1, *[PAD] * 6]
    params = TokenizeParams(10, pad_prompt_tokens=8, truncate_prompt_tokens=3)  # pads first
    assert both_ways(renderer, [[1, 2]], params)[0].token_ids == [PAD, PAD, PAD]
    for bad in (make_renderer(None), make_renderer(make_tokenizer(has_pad=False))):
        with pytest.raises(ValueError, match="pad token"):
            both_ways(bad, [[1]], TokenizeParams(10, pad_prompt_tokens=4))


def test_text_of_ids_on_demand(renderer: Renderer) -> None:
    params = TokenizeParams(WINDOW, needs_detokenization=True)
    prompts = [[BOS, *ids_of("ab")], {"prompt_token_ids": ids_of("ab"), "prompt": "given"}, "c"]
    assert [p.text for p in both_ways(renderer, prompts, params)] == ["<s>ab", "given", "c"]


def test_options_in_the_style_of_tokenizers(caplog: pytest.LogCaptureFixture) -> None:
    base = TokenizeParams(100)
    cases: list[tuple[dict[str, Any], TokenizeParams]] = [
        ({}, base),
        ({"truncation": True, "max_length": 7}, TokenizeParams(100, truncate_prompt_tokens=7)),
        ({"truncation": "longest_first"}, TokenizeParams(100, truncate_prompt_tokens=-1)),
        ({"truncation": "do_not_truncate"}, base),
        ({"truncate_prompt_tokens": 5}, TokenizeParams(100, truncate_prompt_tokens=5)),
        ({"padding": "max_length", "max_length": 9}, TokenizeParams(100, pad_prompt_tokens=9)),
        ({"padding": False}, base),
        ({"pad_prompt_tokens": 3}, TokenizeParams(100, pad_prompt_tokens=3)),
        ({"do_lower_case": True}, TokenizeParams(100, do_lower_case=True)),
        ({"add_special_tokens": False}, TokenizeParams(100, add_special_tokens=False)),
        ({"needs_detokenization": True}, TokenizeParams(100, needs_detokenization=True)),
    ]
    for options, expected in cases:
        assert base.with_kwargs(options) == expected
    assert not caplog.text
    assert base.with_kwargs({"stride": 3}) == base and "stride" in caplog.text


# Messages

MESSAGES = [{"role": "user", "content": "hi"}]


def chat_both_ways(
    renderer: Renderer, conversations: list[Any], params: ChatParams, *args: Any, **more: Any
) -> tuple[list[Any], list[RenderedPrompt]]:
    conversations_1, prompts_1 = renderer.render_chat(conversations, params, *args, **more)
    conversations_2, prompts_2 = asyncio.run(
        renderer.render_chat_async(conversations, params, *args, **more)
    )
    assert conversations_1 == conversations_2
    assert len({p.arrival_time for p in prompts_1}) <= 1
    plain = [_without_time(prompt) for prompt in prompts_1]
    assert plain == [_without_time(prompt) for prompt in prompts_2]
    return conversations_1, plain


def test_chat(renderer: Renderer) -> None:
    more = [*MESSAGES, {"role": "assistant", "content": [{"type": "text", "text": "x"}]}]
    conversations, prompts = chat_both_ways(renderer, [MESSAGES, more], ChatParams())
    texts = ["<s>user:hinull</s>", "<s>user:hi<s>assistant:[x]null</s>"]
    assert [prompt.text for prompt in prompts] == texts
    assert [prompt.token_ids for prompt in prompts] == [ids_of(text) for text in texts]
    assert conversations == [MESSAGES, more]  # no special tokens are added (PP29)
    assert chat_both_ways(renderer, [], ChatParams()) == ([], [])


def test_chat_extras_and_lengths(renderer: Renderer) -> None:
    _, (prompt,) = chat_both_ways(
        renderer, [MESSAGES], ChatParams(), prompt_extras={"cache_salt": "s"}
    )
    assert prompt.cache_salt == "s"
    long = [{"role": "user", "content": "a" * 200}]
    with pytest.raises(InvalidRequestError, match=r"tokens.*64"):
        renderer.render_chat([long], ChatParams())
    params = TokenizeParams(WINDOW, truncate_prompt_tokens=5, add_special_tokens=False)
    _, (prompt,) = chat_both_ways(renderer, [long], ChatParams(), params)
    assert prompt.token_ids == ids_of("anull</s>")[-5:]


@pytest.mark.parametrize(
    ("content_format", "content", "expected"),
    [
        ("auto", "x", "x"), ("string", "x", "x"), ("openai", "x", "[x]"),
        ("auto", ["x", "y"], "[x][y]"), ("string", ["x", "y"], "x\ny"),
        ("openai", ["x", "y"], "[x][y]"),
    ],
)  # fmt: skip
def test_content_formats(
    renderer: Renderer, content_format: Any, content: Any, expected: str
) -> None:
    if isinstance(content, list):
        content = [{"type": "text", "text": text} for text in content]
    messages = [{"role": "user", "content": content}]
    params = ChatParams(
        chat_template_content_format=content_format, chat_template="{{ messages[0].role }}"
    )
    params = params.overridden_by({"chat_template": TEMPLATE})
    _, (prompt,) = chat_both_ways(renderer, [messages], params)
    assert prompt.text == f"<s>user:{expected}null</s>"
    with pytest.raises(InvalidRequestError, match="must be one of"):
        ChatParams(chat_template_content_format="xml")  # type: ignore[arg-type]


def test_auto_is_string_for_templates_without_parts() -> None:
    renderer = make_renderer(make_tokenizer("{{ messages[0].content }}"))
    messages = [{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}]
    assert chat_both_ways(renderer, [messages], ChatParams())[1][0].text == "a\nb"


def test_tools_documents_and_variables(renderer: Renderer) -> None:
    tools = [{"type": "function", "function": {"name": "<s>"}}]
    params = ChatParams(
        tools=tools, documents=[{"t": "</s>"}], chat_template_kwargs={"mood": "calm", "unknown": 1},
        add_generation_prompt=False,
    )  # fmt: skip
    _, (prompt,) = chat_both_ways(renderer, [MESSAGES], params, TokenizeParams(None))
    assert prompt.text is not None and '{"name": "<s>"}' in prompt.text
    assert prompt.text.endswith('calm[{"t": "</s>"}]')
    assert prompt.token_ids.count(BOS) == 1 and EOS not in prompt.token_ids  # S12


def test_template_arguments_override() -> None:
    """The rule of `LLM.chat`: chat_template_kwargs go before arguments of the same name."""
    params = ChatParams(chat_template="a", chat_template_kwargs={"mood": "x", "kept": 1})
    over = {"chat_template": "b", "add_generation_prompt": False, "tools": [], "mood": "y"}
    assert params.overridden_by(over) == ChatParams(
        chat_template="b", add_generation_prompt=False, tools=[],
        chat_template_kwargs={"mood": "y", "kept": 1},
    )  # fmt: skip
    assert params.overridden_by(None) == params


def test_reserved_variables_are_refused(renderer: Renderer) -> None:
    for name in ("messages", "bos_token", "tools", "documents"):
        with pytest.raises(InvalidRequestError, match=name):
            renderer.render_chat([MESSAGES], ChatParams(chat_template_kwargs={name: "x"}))


# Without a tokenizer; warm-up; end


def test_without_a_tokenizer(caplog: pytest.LogCaptureFixture) -> None:
    renderer = make_renderer(None, skip_tokenizer_init=True)
    assert both_ways(renderer, [[1, 2]]) == [RenderedPrompt(None, [1, 2])]
    for call in (
        renderer.get_tokenizer,
        lambda: renderer.render_cmpl(["text"]),
        lambda: renderer.render_chat([MESSAGES], ChatParams()),
        lambda: renderer.render_cmpl([[1]], TokenizeParams(None, needs_detokenization=True)),
    ):
        with pytest.raises(ValueError, match="without a tokenizer"):
            call()
    assert renderer.get_bos_token_id() is None and renderer.get_eos_token_id() is None
    assert len(caplog.records) == 1
    renderer.warmup(ChatParams())
    assert Renderer.from_config(renderer.model_config).tokenizer is None


def test_facts_of_the_tokenizer(renderer: Renderer) -> None:
    assert (renderer.get_bos_token_id(), renderer.get_eos_token_id()) == (BOS, EOS)


def test_warm_up_never_raises(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="headrace.frontend.renderer")
    make_renderer(make_tokenizer()).warmup(ChatParams())
    assert not caplog.records
    make_renderer(make_tokenizer(None)).warmup(ChatParams())
    make_renderer(make_tokenizer("{{ raise_exception('no') }}")).warmup(ChatParams())
    assert [record.levelname for record in caplog.records] == ["DEBUG", "WARNING"]


def test_shutdown_does_not_wait(renderer: Renderer) -> None:
    async def use() -> None:
        release = threading.Event()
        tokenizer = renderer.get_async_tokenizer()
        blocked = asyncio.get_running_loop().run_in_executor(renderer._pool, release.wait)
        waiting = asyncio.ensure_future(tokenizer.encode("a"))
        await asyncio.sleep(0.01)
        renderer.shutdown()
        renderer.shutdown()
        release.set()
        await blocked
        with pytest.raises((asyncio.CancelledError, RuntimeError)):
            await waiting
        with pytest.raises(RuntimeError):
            await tokenizer.encode("b")

    asyncio.run(use())
    Renderer.__new__(Renderer).shutdown()  # construction failed


def test_shared_by_threads() -> None:
    tokenizer = make_tokenizer()
    texts = [f"<s>text {i}</s>" * 20 for i in range(50)]
    expected = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert list(pool.map(tokenizer.encode, texts)) == expected
            pool.map(lambda t: tokenizer.encode(t, parse_special=False), texts)


# The micro-batching tokenizer


class CountingPool(ThreadPoolExecutor):
    num_jobs = 0

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        self.num_jobs += 1
        return super().submit(*args, **kwargs)


@pytest.fixture
def pool() -> Any:
    with CountingPool(1) as executor:
        yield executor


def test_batches_have_the_plain_results(pool: CountingPool) -> None:
    tokenizer = make_tokenizer()
    texts = [f"text <s> {i}" for i in range(100)]

    async def use() -> None:
        batched = BatchedTokenizer(tokenizer, pool)
        options = [(True, True), (False, True), (False, False)]
        work = [batched.encode(text, *options[i % 3]) for i, text in enumerate(texts)]
        encoded = await asyncio.gather(*work)
        assert encoded == [tokenizer.encode(t, *options[i % 3]) for i, t in enumerate(texts)]
        decoded = await asyncio.gather(*(batched.decode(ids) for ids in encoded))
        assert decoded == [tokenizer.decode(ids) for ids in encoded]
        assert await batched.decode(encoded[0], False) == tokenizer.decode(encoded[0], False)

    asyncio.run(use())
    num_batches = -(-len(texts) // MAX_BATCH_SIZE)
    assert pool.num_jobs == 2 * num_batches + 1


def test_an_error_stays_with_its_waiter(pool: CountingPool) -> None:
    async def use() -> None:
        batched = BatchedTokenizer(make_tokenizer(), pool)
        results = await asyncio.gather(
            batched.encode("a"), batched.encode("\ud800"), batched.encode("b"),
            return_exceptions=True,
        )  # fmt: skip
        assert isinstance(results[1], InvalidRequestError)
        assert results[0] == [BOS, *ids_of("a"), EOS] and results[2] == [BOS, *ids_of("b"), EOS]

    asyncio.run(use())
    assert pool.num_jobs == 1


def test_cancelled_waiters_are_left_out(pool: CountingPool) -> None:
    seen: list[str] = []

    class Recording:
        def encode(self, text: str, *_: bool) -> list[int]:
            seen.append(text)
            return [1]

        def decode(self, ids: Sequence[int], *_: bool) -> str:
            return ""

    async def use() -> None:
        batched = BatchedTokenizer(Recording(), pool)  # type: ignore[arg-type]
        release = threading.Event()
        blocked = asyncio.get_running_loop().run_in_executor(pool, release.wait)
        tasks = [asyncio.ensure_future(batched.encode(text)) for text in "abc"]
        await asyncio.sleep(0.01)
        tasks[1].cancel()
        release.set()
        await blocked
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[1], asyncio.CancelledError) and results[::2] == [[1], [1]]

    asyncio.run(use())
    assert seen == ["a", "c"]


def test_one_object_and_several_loops(renderer: Renderer) -> None:
    with pytest.raises(RuntimeError):
        renderer.get_async_tokenizer()  # outside of a loop

    async def use() -> list[int]:
        assert renderer.get_async_tokenizer() is renderer.get_async_tokenizer()
        return await renderer.get_async_tokenizer().encode("a")

    assert asyncio.run(use()) == asyncio.run(use())


def test_the_pool_is_as_large_as_configured() -> None:
    renderer = make_renderer(make_tokenizer(), renderer_num_workers=3)
    assert renderer._pool._max_workers == 3
