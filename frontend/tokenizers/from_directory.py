"""Read the tokenizer of a model directory: tokenizer.json and the small files beside it."""

from pathlib import Path
from typing import Any

import tokenizers

from headrace.configs.errors import ModelFileError
from headrace.configs.model_files.json_file import read_optional_json_object
from headrace.frontend.tokenizers.tokenizer import Tokenizer, TokenizerFacts

_NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_TOKEN_LISTS = ("additional_special_tokens", "extra_special_tokens")


def load_directory(directory: Path) -> Tokenizer:
    """The tokenizer of `directory`; ModelFileError when tokenizer.json is missing or broken.

    What is added around a text is the post-processor of tokenizer.json alone: `add_bos_token` in
    tokenizer_config.json is for the slow tokenizers of old, and transformers ignores it here too.
    """
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise ModelFileError(_missing_message(directory))
    config = _read_config(directory)
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library's plain Exception, whatever is wrong with the file
        raise ModelFileError(
            f"{file}: not a usable tokenizer.json: {error}; download it again"
        ) from None
    try:
        _add_tokens(backend, directory, config)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelFileError(
            f"{directory}: an added token in added_tokens.json or tokenizer_config.json is "
            f"malformed: {error!r}"
        ) from None
    bos = _named_token(backend, config, "bos_token")
    eos = _named_token(backend, config, "eos_token")
    pad = _named_token(backend, config, "pad_token")
    facts = TokenizerFacts(
        source=str(directory),
        bos_token_id=bos[1] if bos else None,
        eos_token_id=eos[1] if eos else None,
        chat_template=_chat_template(directory, config),
        pad_token_id=pad[1] if pad else None,
    )
    return Tokenizer(backend, facts)


def _missing_message(directory: Path) -> str:
    others = [
        name
        for name in ("tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")
        if (directory / name).is_file()
    ]
    there = f" (it has {', '.join(others)}, which is another format)" if others else ""
    return (
        f"{directory}: tokenizer.json is missing{there}. Download it from the model's page, write "
        "it with transformers: AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY)"
        ", or name a directory or file that has one with --tokenizer"
    )


def _read_config(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json, with the tokens of special_tokens_map.json where it names none."""
    config = read_optional_json_object(directory / "tokenizer_config.json")
    more = read_optional_json_object(directory / "special_tokens_map.json")
    for key, value in more.items():
        config.setdefault(key, value)
    return config


def _add_tokens(backend: tokenizers.Tokenizer, directory: Path, config: dict[str, Any]) -> None:
    """Tokens that only the configuration files know, then the special flag of those they name."""
    by_id: dict[int, tokenizers.AddedToken] = {}
    added = read_optional_json_object(directory / "added_tokens.json")
    for content, token_id in added.items():
        by_id[int(token_id)] = tokenizers.AddedToken(str(content), normalized=False)
    decoder = config.get("added_tokens_decoder")
    for token_id, entry in decoder.items() if isinstance(decoder, dict) else ():
        by_id[int(token_id)] = _added_token(entry)
    known = backend.get_added_tokens_decoder()
    for token_id in sorted(by_id):
        token = by_id[token_id]
        if token_id in known:
            continue
        backend.add_tokens([token])
        if backend.token_to_id(token.content) != token_id:
            raise ModelFileError(
                f"{directory}: the added token {token.content!r} has id {token_id} in the "
                f"configuration but {backend.token_to_id(token.content)} in tokenizer.json; the "
                "files do not belong together"
            )
    in_vocabulary = [
        tokenizers.AddedToken(content, normalized=False, special=True)
        for content in _special_contents(config)
        if (token_id := backend.token_to_id(content)) is not None
        and not (token_id in known and known[token_id].special)
    ]
    backend.add_special_tokens(in_vocabulary)


def _special_contents(config: dict[str, Any]) -> list[str]:
    values = [config.get(key) for key in _NAMED_TOKENS]
    for key in _TOKEN_LISTS:
        more = config.get(key) or []
        values.extend(more.values() if isinstance(more, dict) else more)
    return [content for value in values if (content := _content(value))]


def _content(value: Any) -> str | None:
    """The text of a token written as a string or as {"content": ...}."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _added_token(entry: dict[str, Any]) -> tokenizers.AddedToken:
    special = bool(entry.get("special", False))
    return tokenizers.AddedToken(
        str(entry["content"]),
        single_word=bool(entry.get("single_word", False)),
        lstrip=bool(entry.get("lstrip", False)),
        rstrip=bool(entry.get("rstrip", False)),
        normalized=bool(entry.get("normalized", not special)),
        special=special,
    )


def _named_token(
    backend: tokenizers.Tokenizer, config: dict[str, Any], name: str
) -> tuple[str, int] | None:
    content = _content(config.get(name))
    token_id = backend.token_to_id(content) if content else None
    return (content, token_id) if content and token_id is not None else None


def _chat_template(directory: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja, else chat_template.json, else tokenizer_config.json.

    Of named templates the default one.
    """
    try:
        return (directory / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(
            f"{directory / 'chat_template.jinja'}: cannot be read: {error}"
        ) from None
    own_file = read_optional_json_object(directory / "chat_template.json")
    template = own_file.get("chat_template") or config.get("chat_template")
    if isinstance(template, list):
        template = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, dict)
        }
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None
