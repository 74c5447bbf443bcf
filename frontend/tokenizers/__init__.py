"""Tokenizers from a model's own files, without transformers."""

from headrace.frontend.tokenizers.load import load_tokenizer
from headrace.frontend.tokenizers.tokenizer import Tokenizer

__all__ = ["Tokenizer", "load_tokenizer"]
