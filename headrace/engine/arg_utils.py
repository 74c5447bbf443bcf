"""Alias of `headrace.configs.engine_args`, for the import path that people type."""

from headrace.configs.engine_args import AsyncEngineArgs, EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]
