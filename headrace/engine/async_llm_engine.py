"""Alias of `headrace.frontend.async_llm_engine`, for the import path that people type."""

from headrace.frontend.async_llm_engine import AsyncEngineDeadError, AsyncLLMEngine

__all__ = ["AsyncEngineDeadError", "AsyncLLMEngine"]
