"""Attention: mods that users write and backends that run them.

Owns the public names of `octavo.attention`, which load on first use: a script that says what its mods are waits for
torch only where an engine starts, which opens the GPU meanwhile. Knows nothing of an engine.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.attention.flex.dense import flex_attention as flex_attention
    from octavo.attention.mods import AttentionMods as AttentionMods
    from octavo.attention.mods import and_ as and_
    from octavo.attention.mods import or_ as or_
    from octavo.attention.mods import request_field as request_field
    from octavo.attention.mods.drawing import draw as draw
    from octavo.attention.mods.factories import alibi as alibi
    from octavo.attention.mods.factories import causal as causal
    from octavo.attention.mods.factories import chunked as chunked
    from octavo.attention.mods.factories import dilated as dilated
    from octavo.attention.mods.factories import document as document
    from octavo.attention.mods.factories import prefix as prefix
    from octavo.attention.mods.factories import prefix_lm as prefix_lm
    from octavo.attention.mods.factories import rswa as rswa
    from octavo.attention.mods.factories import sinks as sinks
    from octavo.attention.mods.factories import sliding_window as sliding_window
    from octavo.attention.mods.factories import soft_cap as soft_cap
    from octavo.attention.mods.factories import temperature as temperature

_MODULES = {
    "mods.drawing": ("draw",),
    "flex.dense": ("flex_attention",),
    "mods.factories": (
        "alibi",
        "causal",
        "chunked",
        "dilated",
        "document",
        "prefix",
        "prefix_lm",
        "rswa",
        "sinks",
        "sliding_window",
        "soft_cap",
        "temperature",
    ),
    "mods": ("AttentionMods", "and_", "or_", "request_field"),
}
_PUBLIC = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'octavo.attention' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"octavo.attention.{_PUBLIC[name]}"), name)
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted(_PUBLIC)
