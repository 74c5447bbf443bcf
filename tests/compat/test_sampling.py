"""What each sampling parameter does to the output of `LLM.generate`, against transformers."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from headrace import LLM, CompletionOutput, RequestOutput, SamplingParams
from headrace.sampling_params import RequestOutputKind
from tests.e2e.tiny_model import EOS, MAX_MODEL_LEN, VOCAB

pytestmark = pytest.mark.slow

Logits = Callable[[Sequence[int]], torch.Tensor]
PROMPT = [256, 11, 70, 12, 71, 70, 13]
NEAR_TIE = 1e-3  # two kernels may differ by this much


def ask(llm: LLM, prompt: Any = None, **params: Any) -> RequestOutput:
    fields = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **params}
    (output,) = llm.generate([prompt or PROMPT], SamplingParams(**fields), use_tqdm=False)
    return output


def complete(llm: LLM, **params: Any) -> CompletionOutput:
    (completion,) = ask(llm, **params).outputs
    return completion


@pytest.fixture(scope="module")
def letters(llm: LLM) -> list[int]:
    """Tokens that are one ASCII letter each, so that the text has as many characters."""
    return llm.get_tokenizer().encode("abcdefghijklmnop", add_special_tokens=False)


# Scores


@pytest.mark.parametrize(("asked", "num_top"), [(False, 0), (0, 0), (True, 1), (5, 5), (20, 20)])
def test_scores_of_outputs(llm: LLM, logits_of: Logits, asked: int, num_top: int) -> None:
    """The sampled token first, then the best `num_top`; a sum over the whole sequence."""
    completion = complete(llm, temperature=3.0, seed=1, logprobs=asked)
    rows = logits_of([*PROMPT, *completion.token_ids]).log_softmax(-1)[len(PROMPT) - 1 :]
    assert completion.logprobs is not None and len(completion.logprobs) == 12
    total = 0.0
    sizes = set()
    for row, token, entry in zip(rows, completion.token_ids, completion.logprobs, strict=False):
        assert next(iter(entry)) == token
        sizes.add(len(entry))
        best = row.topk(num_top).values.tolist()
        found = sorted((item.logprob for item in entry.values()), reverse=True)
        assert found[:num_top] == pytest.approx(best, abs=NEAR_TIE)
        for token_id, item in entry.items():
            assert item.logprob == pytest.approx(float(row[token_id]), abs=NEAR_TIE)
            below, above = (int((row > row[token_id] + d).sum()) for d in (NEAR_TIE, -NEAR_TIE))
            assert item.rank is not None and below < item.rank <= above
        total += entry[token].logprob
    assert num_top + 1 in sizes and sizes <= {num_top, num_top + 1}
    assert completion.cumulative_logprob == pytest.approx(total)


def test_no_scores_unless_asked(llm: LLM) -> None:
    output = ask(llm)
    assert output.outputs[0].logprobs is None and output.outputs[0].cumulative_logprob is None
    assert output.prompt_logprobs is None


@pytest.mark.parametrize(("asked", "num_top"), [(False, 0), (True, 1), (4, 4)])
def test_scores_of_prompts(llm: LLM, logits_of: Logits, asked: int, num_top: int) -> None:
    scores = ask(llm, prompt_logprobs=asked, max_tokens=1).prompt_logprobs
    rows = logits_of(PROMPT).log_softmax(-1)
    assert scores is not None and len(scores) == len(PROMPT) and scores[0] is None
    for row, token, entry in zip(rows, PROMPT[1:], scores[1:], strict=False):
        assert entry is not None and next(iter(entry)) == token
        best = sorted((item.logprob for item in entry.values()), reverse=True)[:num_top]
        assert best == pytest.approx(row.topk(num_top).values.tolist(), abs=NEAR_TIE)
        for token_id, item in entry.items():
            assert item.logprob == pytest.approx(float(row[token_id]), abs=NEAR_TIE)


# What changes the logits: each token must be the best by the definition


def edited(row: torch.Tensor, outputs: Sequence[int], params: dict[str, Any]) -> torch.Tensor:
    """One row after allowed ids, bad words, bias and penalties, from what these words mean."""
    row = row.clone()
    allowed = params.get("allowed_token_ids")
    for token in range(VOCAB):
        if allowed is not None and token not in allowed:
            row[token] = -math.inf
    for *before, last in params.get("word_ids", []):
        if not before or list(outputs[-len(before) :]) == before:
            row[last] = -math.inf
    for token, bias in (params.get("logit_bias") or {}).items():
        row[token] += bias
    counts = Counter(outputs)
    repetition = params.get("repetition_penalty", 1.0)
    for token in {*PROMPT, *outputs}:
        row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
    for token, count in counts.items():
        row[token] -= params.get("frequency_penalty", 0.0) * count
        row[token] -= params.get("presence_penalty", 0.0)
    return row


def assert_best_each_time(logits_of: Logits, tokens: Sequence[int], params: dict[str, Any]) -> None:
    rows = logits_of([*PROMPT, *tokens])
    for i, token in enumerate(tokens):
        scores = edited(rows[len(PROMPT) - 1 + i], tokens[:i], params)
        assert float(scores[token]) >= float(scores.max()) - NEAR_TIE


EDITS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.5},
    {"frequency_penalty": 2.0},
    {"frequency_penalty": -2.0},
    {"presence_penalty": 2.0},
    {"presence_penalty": -2.0},
    {"logit_bias": {70: 6.0, 11: 5.5, 12: -100.0}},
    {"allowed_token_ids": [3, 70, 99, 200]},
    {"allowed_token_ids": list(range(40, 80)), "presence_penalty": 1.5, "logit_bias": {50: 2.0}},
]


@pytest.mark.parametrize("params", EDITS, ids=str)
def test_penalties_bias_and_allowed_ids(
    llm: LLM, logits_of: Logits, params: dict[str, Any]
) -> None:
    tokens = list(complete(llm, **params, max_tokens=24).token_ids)
    assert_best_each_time(logits_of, tokens, params)
    plain = list(complete(llm, max_tokens=24).token_ids)
    assert_best_each_time(logits_of, plain, {})
    assert tokens != plain  # the parameter does something here


def test_bad_words(llm: LLM, logits_of: Logits, letters: list[int]) -> None:
    """A letter alone is never written; of two letters the second is not, after the first."""
    fields: dict[str, Any] = {"allowed_token_ids": letters, "max_tokens": 30}
    text = complete(llm, **fields).text
    for word in (text[0], text[4:6]):
        found = complete(llm, **fields, bad_words=[word])
        assert word in text and word not in found.text
        word_ids = [llm.get_tokenizer().encode(word, add_special_tokens=False)]
        assert_best_each_time(logits_of, list(found.token_ids), {**fields, "word_ids": word_ids})
    fields["logit_bias"] = {letters[0]: 50.0}  # the first letter, wherever it may stand
    assert complete(llm, **fields).text == "a" * 30
    alternating = complete(llm, **fields, bad_words=["aa"]).text
    assert alternating[::2] == "a" * 15 and "a" not in alternating[1::2]


# What chooses among them


@pytest.mark.parametrize(
    "params",
    [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-6}, {"temperature": 9e-6}],
    ids=str,
)
def test_what_leaves_one_token_is_greedy(llm: LLM, params: dict[str, Any]) -> None:
    fields = {"temperature": 3.0, "seed": 4, **params}
    assert complete(llm, **fields).token_ids == complete(llm).token_ids
    assert complete(llm, temperature=3.0, seed=4).token_ids != complete(llm).token_ids


@pytest.mark.parametrize("params", [{"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.4}], ids=str)
def test_filters_keep_the_likely_tokens(
    llm: LLM, logits_of: Logits, params: dict[str, Any]
) -> None:
    """Every token that was drawn is one of those that the definition keeps."""
    temperature = 2.0
    drawn = ask(llm, temperature=temperature, n=8, seed=2, **params).outputs
    num_unlikely = 0
    for completion in drawn:
        tokens = list(completion.token_ids)
        rows = (logits_of([*PROMPT, *tokens]) / temperature).softmax(-1)[len(PROMPT) - 1 :]
        for row, token in zip(rows, tokens, strict=False):
            share = float(row[token])
            more_likely = row[row > share + 1e-6]
            num_unlikely += len(more_likely) > 0
            if "top_k" in params:
                assert len(more_likely) < params["top_k"]
            elif "top_p" in params:
                assert float(more_likely.sum()) < params["top_p"] + 1e-4
            else:
                assert share >= params["min_p"] * float(row.max()) - 1e-6
    assert num_unlikely > 0  # and not only the best one


def test_zero_and_minus_one_keep_all(llm: LLM) -> None:
    fields: dict[str, Any] = {"temperature": 30.0, "seed": 8}
    everything = complete(llm, **fields).token_ids
    assert complete(llm, **fields, top_k=-1, top_p=1.0, min_p=0.0).token_ids == everything
    assert complete(llm, **fields, top_k=10**9).token_ids == everything
    assert complete(llm, **fields, top_k=2).token_ids != everything


def test_seeds_and_choices(llm: LLM) -> None:
    fields: dict[str, Any] = {"temperature": 30.0, "n": 3}

    def choices(**more: Any) -> list[tuple[int, ...]]:
        outputs = ask(llm, **fields, **more).outputs
        assert [completion.index for completion in outputs] == [0, 1, 2]
        return [tuple(completion.token_ids) for completion in outputs]

    first = choices(seed=7)
    assert choices(seed=7) == first and len(set(first)) == 3
    assert not set(choices(seed=8)) & set(first)
    unseeded = [*choices(), *choices(), *choices(seed=-1), *choices(seed=-1)]
    assert len(set(unseeded)) == 12


def test_the_best_are_returned(llm: LLM) -> None:
    """`best_of`: those of the same `n` sequences with the largest sums, the best first."""
    fields: dict[str, Any] = {"temperature": 3.0, "seed": 5, "logprobs": 0}
    everything = ask(llm, n=5, **fields).outputs
    ranked = sorted(everything, key=lambda c: -(c.cumulative_logprob or 0.0))
    best = ask(llm, n=2, best_of=5, **fields).outputs
    assert [c.token_ids for c in best] == [c.token_ids for c in ranked[:2]]
    assert [c.index for c in best] == [0, 1] and ranked != everything
    assert [c.cumulative_logprob for c in best] == [c.cumulative_logprob for c in ranked[:2]]
    unscored = ask(llm, n=2, best_of=5, temperature=3.0, seed=5).outputs
    assert [c.token_ids for c in unscored] == [c.token_ids for c in ranked[:2]]
    assert all(c.logprobs is None and c.cumulative_logprob is None for c in unscored)


# What ends a sequence, and its text


def test_stop_strings(llm: LLM, letters: list[int]) -> None:
    fields: dict[str, Any] = {"allowed_token_ids": letters, "max_tokens": 30}
    text = complete(llm, **fields).text
    stop = text[5:8]
    start = text.index(stop)
    for given in (stop, [stop], ["never seen", stop]):
        found = complete(llm, **fields, stop=given)
        assert (found.text, found.finish_reason, found.stop_reason) == (text[:start], "stop", stop)
        assert len(found.token_ids) == start + 3
    kept = complete(llm, **fields, stop=stop, include_stop_str_in_output=True)
    assert (kept.text, kept.stop_reason) == (text[: start + 3], stop)
    late = complete(llm, **fields, stop=[text[0]], min_tokens=10)
    assert len(late.token_ids) >= 10 and late.text.startswith(text[:9])


def test_stop_tokens(llm: LLM, letters: list[int]) -> None:
    """The id stays and the text does not, unless it is asked for."""
    fields: dict[str, Any] = {"allowed_token_ids": letters, "max_tokens": 30}
    whole = complete(llm, **fields)
    token = whole.token_ids[6]
    place = list(whole.token_ids).index(token)
    found = complete(llm, **fields, stop_token_ids=[token])
    assert list(found.token_ids) == list(whole.token_ids[: place + 1])
    assert (found.finish_reason, found.stop_reason) == ("stop", token)
    assert found.text == whole.text[:place]
    kept = complete(llm, **fields, stop_token_ids=[token], include_stop_str_in_output=True)
    assert kept.text == whole.text[: place + 1]


def test_the_end_of_text(llm: LLM) -> None:
    sure: dict[str, Any] = {"logit_bias": {EOS: 100.0}, "ignore_eos": False}
    ended = complete(llm, **sure)
    assert (list(ended.token_ids), ended.text) == ([EOS], "")
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)
    later = complete(llm, **sure, min_tokens=3)
    assert len(later.token_ids) == 4 and later.token_ids[-1] == EOS
    assert EOS not in later.token_ids[:3]
    sure["ignore_eos"] = True
    going_on = complete(llm, **sure, max_tokens=5)
    assert (list(going_on.token_ids), going_on.text) == ([EOS] * 5, "")
    assert (going_on.finish_reason, going_on.stop_reason) == ("length", None)
    shown = complete(llm, **sure, max_tokens=3, skip_special_tokens=False)
    assert shown.text == "<eos><eos><eos>"
    spaced = complete(llm, **sure, max_tokens=3, skip_special_tokens=False,
                      spaces_between_special_tokens=False)  # fmt: skip
    assert spaced.text == shown.text  # byte-level tokenizers put none anywhere
    stopped = complete(llm, **sure, stop_token_ids=[EOS])
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", EOS)


def test_a_limit_of_tokens(llm: LLM) -> None:
    """A10, too: a prompt one short of the window gives one token."""
    params = SamplingParams(ignore_eos=True)
    assert len(llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].token_ids) == 16
    for prompt in (PROMPT, [1] * (MAX_MODEL_LEN - 1)):
        for max_tokens in (None, 10**12):
            completion = ask(llm, prompt, max_tokens=max_tokens).outputs[0]
            assert len(completion.token_ids) == MAX_MODEL_LEN - len(prompt)
            assert (completion.finish_reason, completion.stop_reason) == ("length", None)


def test_without_text(llm: LLM) -> None:
    plain, silent = complete(llm, logprobs=1), complete(llm, logprobs=1, detokenize=False)
    assert plain.text and silent.text == ""
    assert silent.token_ids == plain.token_ids and silent.finish_reason == "length"


def test_cut_prompts_keep_their_end(llm: LLM) -> None:
    output = ask(llm, list(range(60)), truncate_prompt_tokens=4)
    assert output.prompt_token_ids == [56, 57, 58, 59]
    assert output.outputs[0].token_ids == ask(llm, [56, 57, 58, 59]).outputs[0].token_ids


# The caller's object


def test_no_field_of_the_caller_changes(llm: LLM) -> None:
    opaque = {"anything": object()}
    params = SamplingParams(
        n=2, best_of=3, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1,
        temperature=0.9, top_p=0.9, top_k=50, min_p=0.01, seed=3, stop=["never"],
        stop_token_ids=[9], max_tokens=3, min_tokens=1, logprobs=2, prompt_logprobs=2,
        logit_bias={5: 500.0}, allowed_token_ids=list(range(5, 250)), extra_args=opaque,
        bad_words=["bad"], truncate_prompt_tokens=5, output_kind=RequestOutputKind.CUMULATIVE,
    )  # fmt: skip
    before = {name: getattr(params, name) for name in params.__struct_fields__}
    copies = {name: repr(value) for name, value in before.items()}
    first = llm.generate([PROMPT], params, use_tqdm=False)
    llm.llm_engine.add_request("mine", PROMPT, params)
    llm.llm_engine.abort_request("mine")
    assert llm.generate([PROMPT], params, use_tqdm=False)[0].outputs == first[0].outputs
    for name, value in before.items():
        assert getattr(params, name) is value and repr(value) == copies[name], name
    assert params.extra_args is opaque and params.bad_words_token_ids is None
