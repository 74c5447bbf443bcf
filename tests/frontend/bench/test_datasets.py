"""Data sets: the same seed gives the same requests, lengths are what was asked for."""

import argparse
import json
import random
from pathlib import Path

import pytest

from headrace.configs.errors import ConfigurationError
from headrace.frontend.cli.bench.datasets import (
    DATASETS,
    DatasetOptions,
    Spread,
    add_dataset_options,
    dataset_options,
    make_samples,
)
from headrace.frontend.cli.bench.prompt_tokens import LocalTokens, WordTokens, random_prompt


class Characters:
    """Every character is a token; capitals are special."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def is_special(self, token_id: int) -> bool:
        return 65 <= token_id <= 90


@pytest.fixture
def tokens() -> LocalTokens:
    return LocalTokens(Characters(), 128)


def write_json(path: Path, value: object) -> Path:
    path.write_text(json.dumps(value))
    return path


def conversation(prompt: str, answer: str) -> dict[str, object]:
    return {"conversations": [{"from": "human", "value": prompt}, {"value": answer}]}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    talks = [conversation("p" * n, "a" * (n + 1)) for n in range(10, 30)]
    lines = "\n".join(json.dumps({"prompt": f"number {n}", "output_tokens": n}) for n in (5, 6, 7))
    (tmp_path / "c.jsonl").write_text(lines + "\n\n")
    return {"sharegpt": write_json(tmp_path / "s.json", talks), "custom": tmp_path / "c.jsonl"}


@pytest.mark.parametrize("name", list(DATASETS))
def test_the_seed_decides(name, files, tokens):
    options = DatasetOptions(name, files.get(name), num_prompts=15, input_len=20, output_len=9)
    first = make_samples(options, tokens, seed=1)
    assert first == make_samples(options, tokens, seed=1)
    assert first != make_samples(options, tokens, seed=2)
    assert len(first) == 15 and all(sample.max_tokens == 9 for sample in first)


@pytest.mark.parametrize("name", ["random", "prefix_repetition"])
def test_made_up_prompts_have_the_length_that_was_asked_for(name, tokens):
    options = DatasetOptions(
        name, num_prompts=7, input_len=12, prefix_len=5, spread=Spread(0.5, 0.25), output_len=8,
        repetition_prefix_len=9, repetition_suffix_len=4, num_prefixes=3,
    )  # fmt: skip
    samples = make_samples(options, tokens, seed=0)
    for sample in samples:
        assert isinstance(sample.prompt, list)
        assert len(sample.prompt) == sample.num_prompt_tokens
        assert not any(65 <= token <= 90 for token in sample.prompt)
    lengths = {sample.num_prompt_tokens for sample in samples}
    assert lengths <= set(range(5 + 6, 5 + 19)) if name == "random" else lengths == {13}


def test_random_prompts_share_their_prefix_only(tokens):
    options = DatasetOptions(num_prompts=20, input_len=30, prefix_len=10)
    prompts = [sample.prompt for sample in make_samples(options, tokens, 0)]
    assert len({tuple(prompt[:10]) for prompt in prompts}) == 1
    assert len({tuple(prompt[10:]) for prompt in prompts}) == 20


def test_lengths_spread_over_the_whole_range(tokens):
    options = DatasetOptions(
        num_prompts=500, input_len=10, output_len=4, spread=Spread(input=0.5, output=1.0)
    )
    samples = make_samples(options, tokens, 0)
    assert {sample.num_prompt_tokens for sample in samples} == set(range(5, 16))
    assert {sample.max_tokens for sample in samples} == set(range(1, 9))


def test_prefixes_are_used_equally_often(tokens):
    options = DatasetOptions("prefix_repetition", num_prompts=12, num_prefixes=4)
    heads = [tuple(sample.prompt[:256]) for sample in make_samples(options, tokens, 0)]
    assert sorted(heads.count(head) for head in set(heads)) == [3, 3, 3, 3]


def test_sharegpt_takes_lengths_from_answers_and_leaves_extremes_out(tmp_path, tokens):
    talks = [
        conversation("ask", "too short a prompt"),
        conversation("question", "no"),
        conversation("q" * 1025, "prompt too long"),
        conversation("q" * 1000, "a" * 1100),
        {"conversations": [{"value": "one turn only"}]},
        "nonsense",
        conversation("a question", "an answer"),
    ]
    path = write_json(tmp_path / "s.json", talks)
    options = DatasetOptions("sharegpt", path, num_prompts=3)
    samples = make_samples(options, tokens, 0)
    assert {(s.prompt, s.num_prompt_tokens, s.max_tokens) for s in samples} == {
        ("a question", 10, 9)
    }
    assert len(samples) == 3
    assert len(make_samples(DatasetOptions("sharegpt", path, 3, oversample=False), tokens, 0)) == 1


def test_files_keep_their_order_if_asked_to(files, tokens):
    options = DatasetOptions("custom", files["custom"], num_prompts=3, shuffle=False)
    samples = make_samples(options, tokens, 0)
    assert [(s.prompt, s.max_tokens) for s in samples] == [
        ("number 5", 5), ("number 6", 6), ("number 7", 7),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting"),
        ('{"prompt": 3}', "needs a text"),
        ("", "no prompt that can be used"),
    ],
)
def test_wrong_files(tmp_path, tokens, text, message):
    (tmp_path / "f").write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        make_samples(DatasetOptions("custom", tmp_path / "f"), tokens, 0)
    with pytest.raises(ConfigurationError, match="No such file"):
        make_samples(DatasetOptions("custom", tmp_path / "g"), tokens, 0)


def test_prompts_as_text(tokens):
    options = DatasetOptions(num_prompts=2, input_len=8)
    ids = make_samples(options, tokens, 0)
    texts = make_samples(options, tokens, 0, as_text=True)
    assert [sample.prompt for sample in texts] == [
        "".join(map(chr, sample.prompt)) for sample in ids
    ]


def test_words_where_there_is_no_tokenizer():
    samples = make_samples(
        DatasetOptions(num_prompts=2, input_len=8, prefix_len=3), WordTokens(), 0
    )
    assert all(len(sample.prompt.split()) == 11 for sample in samples)
    assert samples[0].prompt.split()[:3] == samples[1].prompt.split()[:3]
    assert len(random_prompt(WordTokens(), 4, random.Random(0)).split()) == 4


def parse(*argv: str) -> DatasetOptions:
    parser = argparse.ArgumentParser()
    add_dataset_options(parser, None)
    return dataset_options(parser.parse_args(argv))


def test_options():
    assert parse().name == "random" and parse("--dataset-path", "x").name == "sharegpt"
    assert parse("--random-range-ratio", "0.5").spread == Spread(0.5, 0.5)
    assert parse("--range-ratio", '{"output": 0.5}').spread == Spread(0.0, 0.5)
    assert parse("--random-input-len", "7").input_len == 7
    for argv, message in (
        (("--dataset-name", "sonnet"), "sonnet is not supported yet"),
        (("--dataset-name", "sharegtp"), "sharegtp does not exist"),
        (("--dataset-name", "custom"), "needs --dataset-path"),
        (("--dataset-name", "random", "--dataset-path", "x"), "not for random"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            parse(*argv)
    with pytest.raises(SystemExit):
        parse("--range-ratio", "1.5")
