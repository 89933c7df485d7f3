"""Octavo: a language-model inference engine whose results have the same bits in every batch.

Owns the public names. They load on first use, so that `import octavo` imports nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.attention.mods import AttentionMods as AttentionMods
    from octavo.config.engine_config import EngineConfig as EngineConfig
    from octavo.llm import LLM as LLM
    from octavo.request.outputs import RequestOutput as RequestOutput
    from octavo.request.prompts import TextPrompt as TextPrompt
    from octavo.request.prompts import TokensPrompt as TokensPrompt
    from octavo.request.repetition import RepetitionDetectionParams as RepetitionDetectionParams
    from octavo.request.sampling_params import RequestOutputKind as RequestOutputKind
    from octavo.request.sampling_params import SamplingParams as SamplingParams
    from octavo.request.sampling_params import StructuredOutputsParams as StructuredOutputsParams

__version__ = "0.1.0"

_PUBLIC = {
    "LLM": "octavo.llm",
    "AttentionMods": "octavo.attention.mods",
    "SamplingParams": "octavo.request.sampling_params",
    "EngineConfig": "octavo.config.engine_config",
    "RepetitionDetectionParams": "octavo.request.repetition",
    "RequestOutput": "octavo.request.outputs",
    "RequestOutputKind": "octavo.request.sampling_params",
    "StructuredOutputsParams": "octavo.request.sampling_params",
    "TextPrompt": "octavo.request.prompts",
    "TokensPrompt": "octavo.request.prompts",
}
_PACKAGES = ("attention", "rl")  # those that programs reach into, as `octavo.attention.draw`
__all__ = [
    "LLM",
    "AttentionMods",
    "EngineConfig",
    "RepetitionDetectionParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import a public name, or a package, when it is first asked for."""
    if name not in _PUBLIC and name not in _PACKAGES:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    from octavo.startup import gc_control

    with gc_control.loading():  # torch, which some need
        if name in _PACKAGES:
            value = importlib.import_module(f"octavo.{name}")
        else:
            value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted((*__all__, *_PACKAGES))
