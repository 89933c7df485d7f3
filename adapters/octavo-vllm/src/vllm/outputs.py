"""Octavo's outputs, which have vLLM's names."""

from octavo.request.outputs import CompletionOutput, Logprob, RequestOutput

__all__ = ["CompletionOutput", "Logprob", "RequestOutput"]
