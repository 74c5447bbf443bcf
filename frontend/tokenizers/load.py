"""Find and load the tokenizer of a model path; one built from a GGUF file is cached."""

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from headrace.configs.errors import ModelFileError
from headrace.configs.model_files.atomic_file import replace_file
from headrace.configs.model_files.gguf import GGUFFile
from headrace.frontend.tokenizers.from_directory import load_directory
from headrace.frontend.tokenizers.from_gguf import BUILDER_VERSION, build_tokenizer_json
from headrace.frontend.tokenizers.tokenizer import Tokenizer, TokenizerFacts

logger = logging.getLogger(__name__)


def load_tokenizer(path: Path, cache_dir: Path | None) -> Tokenizer:
    """The tokenizer of `path`: a model directory, a tokenizer.json in one, or a `.gguf` file.

    A tokenizer built from a GGUF file is kept as `cache_dir`/tokenizers/DIGEST.json (None: not
    kept); a cache that cannot be read or written only costs time. Raises ModelFileError when there
    is no tokenizer, naming what is missing.
    """
    path = Path(path)
    if path.is_dir():
        inside = [] if (path / "tokenizer.json").exists() else sorted(path.glob("*.gguf"))
        if len(inside) != 1 or (path / "config.json").exists():
            return load_directory(path)
        path = inside[0]
    if path.name == "tokenizer.json":
        return load_directory(path.parent)
    if not path.is_file():
        raise ModelFileError(
            f"{path}: no such file or directory; a tokenizer is read from a directory or a .gguf "
            "file"
        )
    return _load_gguf(path, cache_dir)


def _load_gguf(path: Path, cache_dir: Path | None) -> Tokenizer:
    with GGUFFile.open(path) as gguf:
        metadata = gguf.metadata
        cached = cache_dir / "tokenizers" / f"{_header_digest(gguf)}.json" if cache_dir else None
        backend = _from_cache(cached)
        if backend is None:
            content = _build(metadata, path)
            try:
                backend = tokenizers.Tokenizer.from_str(content)
            except Exception as error:  # the library's plain Exception, e.g. a merge of no tokens
                raise ModelFileError(
                    f"{path}: the tokenizer in this file cannot be built: {error}"
                ) from None
            _to_cache(cached, content)
        template = metadata.get("tokenizer.chat_template")
        pad = metadata.get("tokenizer.ggml.padding_token_id")
        facts = TokenizerFacts(
            source=str(path),
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_id=metadata.get("tokenizer.ggml.eos_token_id"),
            chat_template=template if isinstance(template, str) else None,
            pad_token_id=pad if isinstance(pad, int) else None,
        )
        return Tokenizer(backend, facts)


def _build(metadata: Mapping[str, Any], path: Path) -> str:
    try:
        content = build_tokenizer_json(metadata, str(path))
    except (TypeError, ValueError) as error:  # text where a number belongs, and the like
        raise ModelFileError(
            f"{path}: a tokenizer.ggml key has the wrong type: {error}; the file is damaged"
        ) from None
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))


def _header_digest(gguf: GGUFFile) -> str:
    """SHA-256 over the builder's version, the library's, and all bytes before the tensors.

    No array is decoded for it.
    """
    end = min((tensor.offset for tensor in gguf.tensors.values()), default=-1)
    digest = hashlib.sha256(f"{BUILDER_VERSION} {tokenizers.__version__}\0".encode())
    with gguf.path.open("rb") as file:
        digest.update(file.read(end))
    return digest.hexdigest()


def _from_cache(cached: Path | None) -> tokenizers.Tokenizer | None:
    if cached is None or not cached.is_file():
        return None
    try:
        return tokenizers.Tokenizer.from_file(str(cached))
    except Exception as error:  # damaged: build it again and overwrite it
        logger.warning("cached tokenizer %s is unusable (%s); building it again", cached, error)
        return None


def _to_cache(cached: Path | None, content: str) -> None:
    if cached is None:
        return
    try:
        with replace_file(cached) as file:
            file.write(content.encode())
    except OSError as error:
        logger.info("the tokenizer was not cached in %s: %s", cached.parent, error)
