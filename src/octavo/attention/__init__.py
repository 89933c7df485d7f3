"""Attention: mods that users write and backends that run them.

Owns the public names of `octavo.attention`. Knows nothing of an engine.
"""

from __future__ import annotations

from octavo.attention.draw import draw as draw
from octavo.attention.flex_plain import flex_attention as flex_attention
from octavo.attention.mod_factories import alibi as alibi
from octavo.attention.mod_factories import causal as causal
from octavo.attention.mod_factories import chunked as chunked
from octavo.attention.mod_factories import dilated as dilated
from octavo.attention.mod_factories import document as document
from octavo.attention.mod_factories import prefix as prefix
from octavo.attention.mod_factories import prefix_lm as prefix_lm
from octavo.attention.mod_factories import rswa as rswa
from octavo.attention.mod_factories import sinks as sinks
from octavo.attention.mod_factories import sliding_window as sliding_window
from octavo.attention.mod_factories import soft_cap as soft_cap
from octavo.attention.mod_factories import temperature as temperature
from octavo.attention.mods import AttentionMods as AttentionMods
from octavo.attention.mods import and_ as and_
from octavo.attention.mods import or_ as or_
from octavo.attention.mods import request_field as request_field
