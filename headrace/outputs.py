"""Alias of `headrace.frontend.outputs`, for the import path that people type."""

from headrace.frontend.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput

__all__ = ["CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput"]
