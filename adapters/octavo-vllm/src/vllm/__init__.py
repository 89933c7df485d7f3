"""The module vllm, as far as trainers import it, over Octavo."""

from octavo import RequestOutput, RequestOutputKind, SamplingParams, StructuredOutputsParams, TextPrompt, TokensPrompt
from octavo.request.outputs import CompletionOutput
from vllm.arguments import AsyncEngineArgs, EngineArgs
from vllm.async_llm import AsyncLLMEngine
from vllm.llm import LLM
from vllm.llm_engine import LLMEngine

__version__ = "0.31.0"  # whose names these are

__all__ = [
    "LLM", "AsyncEngineArgs", "AsyncLLMEngine", "CompletionOutput", "EngineArgs", "LLMEngine", "RequestOutput",
    "RequestOutputKind", "SamplingParams", "StructuredOutputsParams", "TextPrompt", "TokensPrompt", "__version__",
]  # fmt: skip
