"""The module vllm, as far as trainers import it, over Octavo."""

from octavo import RequestOutput, RequestOutputKind, SamplingParams, StructuredOutputsParams, TextPrompt, TokensPrompt
from octavo.request.outputs import CompletionOutput
from vllm.llm import LLM

__version__ = "0.31.0"  # whose names these are

__all__ = [
    "LLM", "CompletionOutput", "RequestOutput", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams",
    "TextPrompt", "TokensPrompt", "__version__",
]  # fmt: skip
