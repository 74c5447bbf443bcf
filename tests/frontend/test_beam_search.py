"""Beam search: the algorithm over made-up scores, and `LLM.beam_search` against brute force."""

import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM
from headrace.configs.errors import InvalidRequestError, UnsupportedFeatureError
from headrace.frontend.beam_search import BeamSearchSequence, beam_score, beam_search
from headrace.frontend.outputs import Logprob
from headrace.sampling_params import BeamSearchParams
from tests.e2e.tiny_model import EOS, MAX_MODEL_LEN

NO_EOS: frozenset[int] = frozenset()


def made_up(tokens: list[int], width: int) -> dict[int, Logprob]:
    """The 2 * width best of twelve tokens, by scores that depend on all tokens before."""
    scores = {t: random.Random(str([*tokens, t])).random() for t in range(12)}
    total = math.log(sum(math.exp(3 * value) for value in scores.values()))
    best = sorted(scores, key=lambda token: -scores[token])[: 2 * width]
    return {token: Logprob(3 * scores[token] - total) for token in best}


def search(prompts: list[list[int]], params: BeamSearchParams, **options: Any) -> list[Any]:
    calls: list[list[list[int]]] = []

    def score(tokens: list[list[int]]) -> list[dict[int, Logprob] | None]:
        calls.append([list(ids) for ids in tokens])
        return [made_up(ids, params.beam_width) for ids in tokens]

    arguments = {"eos_token_ids": NO_EOS, "max_prompt_tokens": 100, "score": score, **options}
    found = beam_search(prompts, params, steps=range(params.max_tokens), **arguments)
    return [found, calls]


def test_wide_beams_find_the_best_of_all_sequences() -> None:
    """With room for every candidate the search is exhaustive."""
    params = BeamSearchParams(beam_width=144, max_tokens=3)
    (found,), _ = search([[1, 2]], params)

    def total(tail: tuple[int, ...]) -> float:
        before = [1, 2]
        result = 0.0
        for token in tail:
            result += made_up(before, 144)[token].logprob
            before = [*before, token]
        return result

    best = sorted(itertools.product(range(12), repeat=3), key=lambda tail: -total(tail))[:5]
    assert [beam.tokens[2:] for beam in found.sequences[:5]] == [list(tail) for tail in best]
    assert found.sequences[0].cum_logprob == pytest.approx(total(best[0]))
    assert len(found.sequences[0].logprobs) == 3


def test_completed_beams_take_no_place_and_end_nothing() -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=4, length_penalty=0.0)  # short ones win
    (found,), calls = search([[1]], params, eos_token_ids=frozenset(range(6)))
    assert [len(call) for call in calls] == [1, 2, 2, 2]
    for call in calls[1:]:
        assert all(ids[-1] >= 6 for ids in call)
    ended = [beam for beam in found.sequences if beam.tokens[-1] < 6]
    assert ended and all(all(token >= 6 for token in beam.tokens[1:-1]) for beam in ended)
    ignoring = BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True)
    (found,), _ = search([[1]], ignoring, eos_token_ids=frozenset(range(6)))
    assert all(len(beam.tokens) == 5 for beam in found.sequences)


def test_all_prompts_go_in_one_call_and_apart() -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=3)
    together, calls = search([[1], [2, 3]], params)
    assert [len(call) for call in calls] == [2, 6, 6]
    for prompt, output in zip([[1], [2, 3]], together, strict=True):
        (alone,), _ = search([prompt], params)
        assert alone == output


def test_beams_without_room_or_scores_are_dropped() -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=5)
    (found,), calls = search([[1]], params, max_prompt_tokens=3)
    assert len(calls) == 3 and found.sequences == []
    (none,), _ = search([[1]], params, score=lambda tokens: [None] * len(tokens))
    assert none.sequences == []


def test_no_steps_return_the_prompt() -> None:
    (found,), calls = search([[4, 5]], BeamSearchParams(beam_width=2, max_tokens=0))
    assert calls == [] and [beam.tokens for beam in found.sequences] == [[4, 5]]


def test_score_is_per_token_without_the_last_eos() -> None:
    beam = BeamSearchSequence([1, 2, 3, 9], [], cum_logprob=-6.0)
    assert beam_score(beam, 1.0, NO_EOS) == -1.5
    assert beam_score(beam, 1.0, frozenset({9})) == -2.0
    assert beam_score(beam, 2.0, frozenset({9})) == pytest.approx(-6 / 9)
    assert beam_score(beam, 0.0, NO_EOS) == -6.0


def reference(path: Path, prompt: list[int], params: BeamSearchParams) -> list[tuple[Any, ...]]:
    """The same search over transformers' logits, a whole forward pass for every beam."""
    import torch
    import transformers

    model = transformers.LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    live: list[tuple[list[int], float]] = [(prompt, 0.0)]
    done: list[tuple[list[int], float]] = []

    def rank(beam: tuple[list[int], float]) -> float:
        length = len(beam[0]) - (beam[0][-1] == EOS)
        return -beam[1] / length**params.length_penalty

    for _ in range(params.max_tokens):
        candidates = []
        for tokens, total in live:
            with torch.inference_mode():
                logprobs = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
            values, ids = logprobs.topk(2 * params.beam_width)
            for value, token in zip(values.tolist(), ids.tolist(), strict=True):
                (done if token == EOS else candidates).append(([*tokens, token], total + value))
        live = sorted(candidates, key=rank)[: params.beam_width]
    return sorted(done + live, key=rank)[: params.beam_width]


@pytest.mark.slow
@pytest.mark.parametrize("length_penalty", [1.0, 2.0, 0.0])
def test_against_transformers(llm: LLM, tiny_model: Path, length_penalty: float) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=6, length_penalty=length_penalty)
    prompt = llm.get_tokenizer().encode("one")
    found, from_ids = llm.beam_search([{"prompt": "one"}, {"prompt_token_ids": prompt}], params)
    expected = reference(tiny_model, prompt, params)
    assert [beam.tokens for beam in found.sequences] == [tokens for tokens, _ in expected]
    assert [beam.cum_logprob for beam in found.sequences] == pytest.approx(
        [total for _, total in expected], abs=1e-4
    )
    assert [beam.tokens for beam in from_ids.sequences] == [tokens for tokens, _ in expected]
    best = found.sequences[0]
    assert best.text == llm.get_tokenizer().decode(best.tokens, skip_special_tokens=False)
    assert best.finish_reason is None and len(best.logprobs) == len(best.tokens) - len(prompt)


@pytest.mark.slow
def test_arguments_of_beam_search(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    small = BeamSearchParams(beam_width=2, max_tokens=2)
    strings = llm.beam_search(["a", "b"], small, use_tqdm=True)
    assert [beam.text[:4] for beam in (o.sequences[0] for o in strings)] == ["<s>a", "<s>b"]
    assert "may end earlier" in caplog.text
    assert llm.beam_search([], small) == []
    with pytest.raises(InvalidRequestError, match=r"logprobs.*20.*22"):
        llm.beam_search(["a"], BeamSearchParams(beam_width=11, max_tokens=2))
    with pytest.raises(UnsupportedFeatureError, match="LoRA"):
        llm.beam_search(["a"], small, lora_request=object())
    with pytest.raises(InvalidRequestError, match="leaves no room"):
        llm.beam_search([{"prompt_token_ids": [1] * MAX_MODEL_LEN}], small)
    nearly = [1] * (MAX_MODEL_LEN - 1)
    one = BeamSearchParams(beam_width=2, max_tokens=1)
    assert len(llm.beam_search([{"prompt_token_ids": nearly}], one)[0].sequences) == 2
    assert llm.beam_search([{"prompt_token_ids": nearly}], small)[0].sequences == []
    assert not llm.llm_engine.has_unfinished_requests()
