"""Alias of `headrace.frontend.llm_engine`, for the import path that people type."""

from headrace.frontend.llm_engine import LLMEngine

__all__ = ["LLMEngine"]
