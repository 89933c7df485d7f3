"""vLLM's words for compilation and graphs."""

from __future__ import annotations

import enum

from vllm.config import Settings


class CompilationMode(enum.IntEnum):
    """How much is compiled."""

    NONE = 0
    STOCK_TORCH_COMPILE = 1
    DYNAMO_TRACE_ONCE = 2
    VLLM_COMPILE = 3


class CUDAGraphMode(enum.Enum):
    """Which steps are captured."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (2, 0)
    FULL_AND_PIECEWISE = (2, 1)


class PassConfig(Settings):
    """Of passes over a graph."""
