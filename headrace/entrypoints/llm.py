"""Alias of `headrace.frontend.llm`, for the import path that people type."""

from headrace.frontend.llm import LLM

__all__ = ["LLM"]
