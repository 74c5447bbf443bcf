"""Chat templates: equal to transformers, and only the template itself can write control tokens."""

import time
import tracemalloc
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from headrace.configs.errors import InvalidRequestError
from headrace.frontend.chat_template import render_chat
from headrace.frontend.render_params import ChatParams
from headrace.frontend.special_spellings import SpellingGuard, spelling_set
from headrace.frontend.template_budget import TemplateLimits
from headrace.frontend.template_sandbox import compile_template
from headrace.frontend.tokenizers.tokenizer import Tokenizer, TokenizerFacts

SPECIALS = ["<|im_start|>", "<|im_end|>", "<bos>", "[INST]", "[/INST]", "<|a|>", "|>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{{ message['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- continue %}
    {%- endif %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) and messages[0].role != 'system' %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + message.content + ' [/INST]' }}
    {%- else %}
        {%- generation %}
            {{- ' ' + message.content + eos_token }}
        {%- endgeneration %}
    {%- endif %}
{%- endfor %}"""
PARTS = """{%- macro show(content) %}
    {%- if content is string %}
        {{- content }}
    {%- else %}
        {%- for item in content %}
            {%- if item.type == 'text' %}{{ item.text }}{% endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- for m in messages %}
<|{{ m.role }}|>
{{ show(m.content) }}
{%- if m.tool_calls %}{% for call in m.tool_calls %}
{{ call.function.arguments | tojson(indent=2) }}
{%- endfor %}{% endif %}
{%- if not loop.last %}{{ loop.length }}|{{ loop.revindex }}{% endif %}
{%- endfor %}
{%- if thinking is defined and thinking %}<|a|>{% endif %}"""
TEMPLATES = {"chatml": CHATML, "inst": INST, "parts": PARTS}

CONTINUED = ChatParams(add_generation_prompt=False, continue_final_message=True)
CONVERSATIONS = [
    [{"role": "user", "content": "Hi there"}],
    [
        {"role": "user", "content": "  line one\nline two é ß 漢字  "},
        {"role": "assistant", "content": 'Well: {"a": [1, 2]}'},
        {"role": "user", "content": "<b>bold</b> & 'quotes'"},
    ],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "x" * 50},
        {"role": "assistant", "content": ""},
    ],
]


def make_backend() -> tokenizers.Tokenizer:
    """A byte-level BPE with a few merges and specials."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("l", "i"), ("li", "n"), ("lin", "e"), ("Ġ", "a"), ("<", "|"), ("i", "m")]
    vocab = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(word, special=True) for word in SPECIALS])
    return backend


def make_tokenizer(template: str | None) -> Tokenizer:
    backend = make_backend()
    bos, eos = backend.token_to_id("<bos>"), backend.token_to_id("<|im_end|>")
    return Tokenizer(backend, TokenizerFacts("test", bos, eos, template))


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("prompts", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_equal_to_transformers(name, messages, prompts):
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_object=make_backend(), bos_token="<bos>", eos_token="<|im_end|>"
    )
    options = {"chat_template": TEMPLATES[name], "add_generation_prompt": prompts}
    text = reference.apply_chat_template(messages, tokenize=False, **options)
    ids = reference.encode(text, add_special_tokens=False)
    rendered = render_chat(
        make_tokenizer(TEMPLATES[name]), messages, ChatParams(add_generation_prompt=prompts)
    )
    assert rendered.text == text
    assert rendered.token_ids == ids


@pytest.mark.slow
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_smollm2_equal_to_transformers(smollm2_gguf: Path, messages):
    from headrace.frontend.tokenizers import load_tokenizer

    transformers = pytest.importorskip("transformers")
    tokenizer = load_tokenizer(smollm2_gguf, None)
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_object=make_backend(), bos_token="<bos>", eos_token="<|im_end|>"
    )
    text = reference.apply_chat_template(
        messages, tokenize=False, chat_template=tokenizer.chat_template, add_generation_prompt=True
    )
    rendered = render_chat(tokenizer, messages)
    assert rendered.text == text and "<|im_start|>" in text
    assert tokenizer.decode(rendered.token_ids, skip_special_tokens=False) == text
    assert tokenizer.special_tokens["<|im_start|>"] in rendered.token_ids
    for spelling, token_id in tokenizer.special_tokens.items():
        assert_content_is_harmless(tokenizer, f"a{spelling}b", token_id)


def assert_content_is_harmless(tokenizer: Tokenizer, content: str, token_id: int) -> None:
    """Rendering `content` gives no more special tokens than rendering an innocent word."""
    ids = render_chat(tokenizer, [{"role": "user", "content": content}]).token_ids
    plain = render_chat(tokenizer, [{"role": "user", "content": "word"}]).token_ids
    assert ids.count(token_id) == plain.count(token_id)
    assert content.strip() in tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("spelling", SPECIALS)
def test_content_never_becomes_a_control_token(name, spelling):
    """S12."""
    tokenizer = make_tokenizer(TEMPLATES[name])
    token_id = tokenizer.special_tokens[spelling]
    for content in (spelling, f"a{spelling}b", spelling * 3, f"<|im_{spelling}start|>", "<|<|a|>"):
        if name == "parts" and spelling in ("|>", "<|a|>"):
            continue  # its own literals spell these
        assert_content_is_harmless(tokenizer, content, token_id)


def test_every_string_of_a_message_is_content():
    template = (
        "{% for m in messages %}{{ m.name }}{{ m.content }}{{ m.tool_calls | tojson }}{% endfor %}"
        "{{ thinking }}"
    )
    tokenizer = make_tokenizer(template)
    function = {"name": "[INST]", "arguments": '{"<bos>": ["\\u003cbos>", "<|im_end|>"]}'}
    message = {
        "role": "user", "name": "<|im_start|>", "content": "<bos>",
        "tool_calls": [{"type": "function", "function": function}],
    }  # fmt: skip
    rendered = render_chat(
        tokenizer,
        [message],
        ChatParams(chat_template_kwargs={"thinking": "<|im_start|>"}),
    )
    assert not set(rendered.token_ids) & set(tokenizer.special_tokens.values())
    assert rendered.text.count("<|im_start|>") == 2 and rendered.text.count("<bos>") == 3


def test_adjacent_strings_do_not_join_into_a_spelling():
    tokenizer = make_tokenizer(
        "{% for m in messages %}{% for p in m.content %}{{ p.text | trim }}{% endfor %}"
        "{% endfor %}<|im_end|>"
    )
    ends = list(tokenizer.special_tokens.values())
    for cut in range(1, len("<|im_start|>")):
        parts = ["<|im_start|>"[:cut] + " ", "<|im_start|>"[cut:]]
        content = [{"type": "text", "text": part} for part in parts]
        ids = render_chat(tokenizer, [{"role": "user", "content": content}]).token_ids
        allowed = {tokenizer.special_tokens["<|im_end|>"]}
        assert {i for i in ids if i in ends} == allowed, parts


def test_merges_across_template_and_content_stay():
    """Content with a spelling in it is cut only at the template's own specials."""
    tokenizer = make_tokenizer("<bos>lin{{ messages[0].content }}<|im_end|>")
    rendered = render_chat(tokenizer, [{"role": "user", "content": "e<bos>"}])
    text_ids = tokenizer.encode("line<bos>", add_special_tokens=False, parse_special=False)
    specials = tokenizer.special_tokens
    assert rendered.token_ids == [specials["<bos>"], *text_ids, specials["<|im_end|>"]]
    assert tokenizer.encode("line", add_special_tokens=False)[0] == text_ids[0]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([*SPECIALS, "<|", "im_", "start|>", " ", "a", "\n", "é"])))
def test_marking_is_undone_and_hides_every_spelling(pieces):
    text = "".join(pieces)
    spellings = spelling_set(tuple(SPECIALS))
    guard = SpellingGuard(spellings, text, "")
    marked = guard.mark(text)
    assert not any(spelling in marked for spelling in SPECIALS)
    assert len(marked) == len(text) and guard.unmark(marked) == text


def test_private_use_characters_in_the_input_stay():
    tokenizer = make_tokenizer(CHATML)
    content = "".join(map(chr, range(0xF0000, 0xF0100))) + "<bos>"
    rendered = render_chat(tokenizer, [{"role": "user", "content": content}])
    assert content in rendered.text
    assert tokenizer.special_tokens["<bos>"] not in rendered.token_ids


def test_marking_takes_linear_time():
    words = tuple(f"<unused{i}>" for i in range(5000))
    spellings = spelling_set(words)

    def seconds(size: int) -> float:
        text = "<unused" * size
        best = float("inf")
        for _ in range(5):  # CPU time: what else runs does not count
            began = time.thread_time()
            SpellingGuard(spellings, text, "").mark(text)
            best = min(best, time.thread_time() - began)
        return best

    assert seconds(40_000) / seconds(20_000) < 2.5


def test_content_parts():
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    messages = [{"role": "user", "content": parts}]
    assert "a\nb<|im_end|>" in render_chat(make_tokenizer(CHATML), messages).text
    assert "<|user|>\nab" in render_chat(make_tokenizer(PARTS), messages).text
    only_parts = (
        "{% for m in messages %}{% for p in m['content'] %}{{ p.text }}{% endfor %}{% endfor %}"
    )
    text = render_chat(make_tokenizer(only_parts), [{"role": "user", "content": "plain"}]).text
    assert text == "plain"


def test_continue_final_message():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Sure, "}]
    for name, end in [("chatml", "<|im_start|>assistant\nSure, "), ("parts", "|>\nSure, ")]:
        text = render_chat(
            make_tokenizer(TEMPLATES[name]), messages, CONTINUED,
        ).text  # fmt: skip
        assert text.endswith(end)
    with pytest.raises(InvalidRequestError, match="does not render the final message"):
        render_chat(
            make_tokenizer("{{ messages[0].content }}"), messages, CONTINUED,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only users') }}", "only users"),
        ("{% for %}", "^the chat template does not compile"),
        ("{{ messages[0].content + 1 }}", "cannot render"),
        ("{{ messages.append(1) }}", "unsafe|not safely|callable"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{% set ns = namespace(n=0) %}{% for i in range(100000) %}{% for j in range(100000) %}"
         "{% set ns.n = ns.n + 1 %}{% endfor %}{% endfor %}", "longer than 0.3 s"),
        ("{% set r = range(100000) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
         "longer than 0.3 s"),
        ("{% for i in range(90000) %}0123456789{% endfor %}", "longer than 100000"),
        ("{{ 'a' * 1000000000 }}", "longer than 100000"),
        ("{{ 10 ** (10 ** 10) }}", "too large"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "too deeply"),
        ("{% include 'other' %}", "chat template|cannot render"),
    ],
)  # fmt: skip
def test_hostile_templates(template, message):
    """S11: sandboxed, bounded in time and output."""
    limits = TemplateLimits(max_seconds=0.3, max_output_chars=100_000)
    began = time.monotonic()
    with pytest.raises(InvalidRequestError, match=message):
        render_chat(make_tokenizer(template), [{"role": "user", "content": "a"}], limits=limits)
    assert time.monotonic() - began < 2


DOUBLE = "{% set ns = namespace(s='a') %}{% for i in range(40) %}{% set ns.s = STEP %}{% endfor %}"
DOUBLE_LIST = DOUBLE.replace("'a'", "[1]")
MEMORY_BOMBS = [
    DOUBLE.replace("STEP", "ns.s ~ ns.s"),
    DOUBLE.replace("STEP", "ns.s + ns.s"),
    DOUBLE.replace("STEP", "ns.s * 2"),
    DOUBLE.replace("STEP", "[ns.s, ns.s] | join"),
    DOUBLE.replace("STEP", "''.join([ns.s, ns.s])"),
    DOUBLE.replace("STEP", "ns.s.join([ns.s, ns.s, ''])"),
    DOUBLE.replace("STEP", "ns.s | replace('a', 'aa')"),
    DOUBLE.replace("STEP", "ns.s.replace('a', 'aa')"),
    DOUBLE.replace("STEP", "'%s%s' % (ns.s, ns.s)"),
    DOUBLE.replace("STEP", "'%s%s' | format(ns.s, ns.s)"),
    DOUBLE.replace("STEP", "'{0}{0}'.format(ns.s)"),
    DOUBLE.replace("STEP", "[ns.s, ns.s] | string"),
    DOUBLE.replace("STEP", "[ns.s, ns.s] | tojson"),
    DOUBLE.replace("STEP", "twice(ns.s)").replace(
        "{% set ns", "{% macro twice(s) %}{{ s }}{{ s }}{% endmacro %}{% set ns", 1
    ),
    DOUBLE.replace("{% set ns.s = STEP %}", "{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}"
                   "{% set ns.s = t %}"),
    DOUBLE.replace("STEP", "(ns.s ~ 'a')[:] ~ ns.s[::-1]"),
    DOUBLE_LIST.replace("STEP", "ns.s + ns.s"),
    DOUBLE_LIST.replace("STEP", "ns.s * 2"),
    DOUBLE_LIST.replace("STEP", "[ns.s, ns.s] | sum(start=[])"),
    DOUBLE_LIST.replace("STEP", "[ns.s, ns.s]") + "{{ ns.s }}",
    DOUBLE_LIST.replace("STEP", "[ns.s, ns.s]") + "{{ ns.s | tojson }}",
    DOUBLE_LIST.replace("STEP", "[ns.s, ns.s]") + "{{ ns.s | string }}",
    DOUBLE_LIST.replace("STEP", "[ns.s, ns.s]") + "{{ 'a' ~ ns.s }}",
    DOUBLE_LIST.replace("STEP", "[ns.s, ns.s]") + "{{ '%s' % [ns.s] }}",
    DOUBLE_LIST.replace("STEP", "[ns.s, ns.s]") + "{{ ns }}",
    DOUBLE_LIST.replace("STEP", "{1: ns.s, 2: ns.s}") + "{{ ns.s.items() }}",
    "{{ (['a' * 90000] * 9000) | map('upper') | list | length }}",
    "{{ (['a' * 90000] * 9000) | map('trim') | sort | length }}",
    "{{ (['a' * 90000] * 9000) | map('upper') | unique | list | length }}",
    "{{ ([['a'] * 9000] * 9000) | map('sort') | list | length }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ 'a'.center(1000000000) }}",
    "{{ 'a'.ljust(width=1000000000) }}",
    "{{ '1'.zfill(1000000000) }}",
    "{{ '\t'.expandtabs(1000000000) }}",
    "{{ 'a' | indent(1000000000, true) }}",
    "{{ [1] | tojson(indent=1000000000) }}",
    "{{ 'a' | center(1000000000) }}",
    "{{ [1] | batch(1000000000, 'x') | list }}",
    "{{ [1] | slice(1000000000) | list }}",
    "{{ lipsum(n=100000) }}",
    "{{ (1).to_bytes(1000000000, 'big') }}",
    "{{ 'a'.encode() }}",
    "{{ 'a'.translate({97: 'b' * 90000}) }}",
    "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{% set _headrace_budget = 1 %}{{ 'a' * 1000000000 }}",
    "{% set ns = namespace(all=[]) %}{% for i in range(5000) %}"
    "{% set ns.all = ns.all + [(messages[0].content * 30000)[1:]] %}{% endfor %}",
    "{% set ns = namespace(all=[]) %}{% for i in range(5000) %}"
    "{% set ns.all = ns.all + [(i ~ 'a' * 30000) | upper] %}{% endfor %}",
]  # fmt: skip


@pytest.mark.parametrize("template", MEMORY_BOMBS)
def test_templates_cannot_use_up_the_memory(template):
    """S11: refused long before the memory is gone, whichever operation makes the text."""
    limits = TemplateLimits(max_seconds=5.0, max_output_chars=100_000)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError):
            render_chat(make_tokenizer(template), [{"role": "user", "content": "a"}], limits=limits)
        assert tracemalloc.get_traced_memory()[1] < 60_000_000
    finally:
        tracemalloc.stop()


def test_operations_with_a_budget_have_the_plain_results():
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=make_backend())
    expressions = [
        "'a' ~ 1 ~ none ~ true ~ nothing ~ [1, 'x']", "'%05.1f|%s|%d' % (1.25, 'x', 20240101)",
        "'20240101 %s' | format(3)", "'{:>4}|{x}'.format(1, x=2)", "[1, 'b', none] | join(', ')",
        "messages | join('|', attribute='role')", "'abab' | replace('a', 'c', 1)", "'abc'[1:]",
        "'abab'.replace('a', '')", "'x\ny' | indent(2)", "'x\ny' | indent(2, true)",
        "[1, 2] | sum", "messages | map(attribute='content') | list", "{'a': [1, 'é']} | tojson",
        "{'b': 1, 'a': 2} | tojson(indent=2)", "'abc' | list", "{'a': 1} | list", "7 * 6 + 2 ** 5",
        "'-' * 5", "[1] * 3", "[1] + [2]", "', '.join(['a', 'b'])", "'a'.center(5)", "5 % 3",
        "'Ab' | upper | lower", "{'a': 1}.items() | list", "'a b c'.split()",
        "'a\tb'.expandtabs(4)",
        "nothing", "none", "1.5", "messages | length", "'  x ' | trim", "[3, 1, 2] | sort | join",
    ]  # fmt: skip
    template = "\n".join(f"{{{{ {expression} }}}}" for expression in expressions) + (
        "{% set x %}a{{ 1 }}b{% endset %}{{ x }}{% set y | upper %}c{% endset %}{{ y }}"
        "{% filter upper %}d{{ 'e' }}{% endfilter %}"
        "{% macro m(a, b=2) %}<{{ a }}{{ b }}{{ caller() if caller }}>{% endmacro %}{{ m(1) }}"
        "{% call m(3) %}x{% endcall %}{% for k, v in {'a': 1} | items %}{{ k }}{{ v }}{% endfor %}"
        "{% for x in [1, [2]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "hello"}]
    text = reference.apply_chat_template(messages, tokenize=False, chat_template=template)
    assert render_chat(make_tokenizer(template), messages).text == text


def test_template_is_compiled_once():
    assert compile_template(CHATML) is compile_template(CHATML)


def test_template_variables():
    tokenizer = make_tokenizer("{{ messages[0].content }}{{ mood }}")
    messages = [{"role": "user", "content": "a"}]
    options = {"mood": "calm", "not_there": "x"}
    assert (
        render_chat(tokenizer, messages, ChatParams(chat_template_kwargs=options)).text == "acalm"
    )
    for name in ("messages", "bos_token", "_headrace_budget", "add_generation_prompt"):
        with pytest.raises(InvalidRequestError, match=name):
            render_chat(tokenizer, messages, ChatParams(chat_template_kwargs={name: "x"}))


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def test_deeply_nested_template_variables():
    tokenizer = make_tokenizer("{{ messages[0].content }}{{ mood }}")
    messages = [{"role": "user", "content": "a"}]
    render_chat(tokenizer, messages, ChatParams(chat_template_kwargs={"mood": nested(50)}))
    with pytest.raises(InvalidRequestError, match="64 levels") as refused:
        render_chat(tokenizer, messages, ChatParams(chat_template_kwargs={"mood": nested(900)}))
    assert refused.value.parameter == "chat_template_kwargs"


@pytest.mark.parametrize(
    "messages",
    [[], ["a"], [{"role": 1}], [{"content": "a"}], [{"role": "user", "content": 1}],
     [{"role": "user", "content": [{"type": "image_url"}]}],
     [{"role": "user", "content": [{"type": "text"}]}],
     [{"role": "user", "content": [3]}],
     [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
     [{"role": "assistant", "tool_calls": 1}], [{"role": "assistant", "tool_calls": {"a": 1}}],
     [{"role": "user", "content": "a", "extra": nested(900)}]],
)  # fmt: skip
def test_bad_messages(messages):
    with pytest.raises(InvalidRequestError) as refused:
        render_chat(make_tokenizer(CHATML), messages)
    assert refused.value.parameter == "messages"


def test_no_template():
    with pytest.raises(InvalidRequestError, match=r"no chat template.*--chat-template.*complete"):
        render_chat(make_tokenizer(None), [{"role": "user", "content": "a"}])
