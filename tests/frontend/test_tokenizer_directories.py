"""Tokenizers from a model directory against transformers."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from headrace.configs.errors import ModelFileError
from headrace.frontend.tokenizers import load_tokenizer

TEXTS = [
    "",
    "Hello, world! The capital of France is Paris.",
    "  two  three   four\tand\ttabs \t mixed \n\n\nend\r\n",
    "it's we're I'll 0 1 12 123 3.14159 naïve café Привет 你好 🤯👩‍👩‍👧‍👦",
    "def f(x: int) -> int:\n    return x**2 + 1  # squared\n",
    "a<s>b</s>c <|extra|> <tool><tool>",
]


def write_directory(directory: Path, *, template: bool = False) -> Path:
    """A tiny tokenizer.json with special, user-defined and configuration-only tokens."""
    directory.mkdir()
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=350,
        show_progress=False,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    if template:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    backend.enable_truncation(5)
    backend.enable_padding(length=5)
    backend.save(str(directory / "tokenizer.json"))
    size = backend.get_vocab_size()
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "__type": "AddedToken"},
        "added_tokens_decoder": {
            str(size): {"content": "<|extra|>", "special": True, "normalized": False}
        },
        "chat_template": [
            {"name": "tool_use", "template": "T"},
            {"name": "default", "template": "D"},
        ],
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def change_config(directory: Path, **changes: object) -> None:
    file = directory / "tokenizer_config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@pytest.mark.slow
@pytest.mark.parametrize("template", [False, True])
@pytest.mark.parametrize("add_bos", [None, True, False])
def test_directory_ids_equal_transformers(
    template: bool, add_bos: bool | None, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    directory = write_directory(tmp_path / "m", template=template)
    change_config(directory, add_bos_token=add_bos)
    ours = load_tokenizer(directory, None)
    theirs = AutoTokenizer.from_pretrained(directory)
    for text in [*TEXTS, "a<tool>b<|extra|>c</s>"]:
        for add_special in (True, False):
            assert ours.encode(text, add_special) == theirs.encode(
                text, add_special_tokens=add_special
            ), text
        ids = theirs.encode(text)
        for skip in (True, False):
            expected = theirs.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
            assert ours.decode(ids, skip) == expected
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.bos_token_id == theirs.bos_token_id
    assert set(ours.special_tokens) == set(theirs.all_special_tokens) - {"[PAD]"} | {"<|extra|>"}
    assert ours.add_bos_token == template


def test_directory_facts(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "m")
    tokenizer = load_tokenizer(directory, None)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.chat_template == "D"
    extra = tokenizer.token_to_id("<|extra|>")
    assert extra == tokenizer.max_token_id and tokenizer.is_special(extra)
    assert not tokenizer.is_special(tokenizer.encode("<tool>")[0])
    assert len(tokenizer.encode(TEXTS[1])) > 5  # truncation in the file is off
    assert load_tokenizer(directory / "tokenizer.json", None).encode("x") == tokenizer.encode("x")
    ids = tokenizer.encode("<|extra|></s>", parse_special=False)
    assert not any(map(tokenizer.is_special, ids)) and tokenizer.decode(ids) == "<|extra|></s>"
    (directory / "chat_template.jinja").write_text("J")
    assert load_tokenizer(directory, None).chat_template == "J"


def test_special_tokens_map_fills_gaps(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "m")
    change_config(directory, eos_token=None, bos_token=None)
    assert load_tokenizer(directory, None).eos_token is None
    (directory / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')
    assert load_tokenizer(directory, None).eos_token == "</s>"


def test_unusable_directories(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such file or directory"):
        load_tokenizer(tmp_path / "nowhere", None)
    with pytest.raises(ModelFileError, match=r"tokenizer.json is missing\. Download it"):
        load_tokenizer(tmp_path, None)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ModelFileError, match=r"it has tokenizer.model, which is another format"):
        load_tokenizer(tmp_path, None)
    directory = write_directory(tmp_path / "m")
    change_config(directory, added_tokens_decoder={"7": {"content": "<|other|>"}})
    with pytest.raises(ModelFileError, match="do not belong together"):
        load_tokenizer(directory, None)
    change_config(directory, added_tokens_decoder={"x": {}})
    with pytest.raises(ModelFileError, match="malformed"):
        load_tokenizer(directory, None)
    (directory / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ModelFileError, match="holds a JSON list, not an object"):
        load_tokenizer(directory, None)
    (directory / "tokenizer_config.json").unlink()
    (directory / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ModelFileError, match=r"not a usable tokenizer\.json"):
        load_tokenizer(directory, None)


def test_decoder_that_cannot_stream_is_refused(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelFileError, match=r"decoder \(WordPiece\) is not supported"):
        load_tokenizer(tmp_path, None)
