"""The cache of an engine, planned: from settings and what workers said to a CachePlan.

Owns the one layout and the kernel block sizes that suit all attention backends. Knows backends by the facts that they
state, and no device. Invariant: a setting is met or refused by name, never dropped.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec

from octavo.cache.groups import CacheGroup, TableSpec, block_bytes, make_groups, pages_differ
from octavo.cache.kernel_blocks import choose_tables
from octavo.cache.layout import Layout, layout_by_name, resolve_layout
from octavo.cache.plan import CachePlan, show_bytes
from octavo.cache.policies import lost_prefixes
from octavo.cache.specs import LayerSpec
from octavo.checkpoint.arch import Arch
from octavo.config.engine_config import Resolved
from octavo.config.settings import ConfigError
from octavo.startup.memory_plan import ITEMSIZE, plan_memory
from octavo.worker.facts import BackendFacts, backend_of_layers

_LOG = logging.getLogger(__name__)


def plan_cache(
    arch: Arch,
    resolved: Resolved,
    specs: Sequence[LayerSpec],
    backends: Sequence[BackendFacts],
    *,
    free_bytes: int,
    total_bytes: int,
    weight_bytes: int,
    weights_loaded: bool,
    buffer_bytes: Callable[[Sequence[TableSpec]], int],
    max_num_drafts: int = 0,
    num_lookahead: int = 0,
    num_next_tokens: int = 0,
    moves_runs: bool = False,
) -> CachePlan:
    """The layers' groups, the layout and the block tables that suit all backends, and as many blocks as fit.

    See `plan_memory`. specs: what each layer keeps, mods included. backends: what those that `resolved` names state.
    buffer_bytes: what they keep for themselves with such tables. moves_runs: of the connector, see its Kind.
    Raises ValueError, naming what each takes, or the numbers of what does not fit.
    """
    itemsize, interval = ITEMSIZE[resolved.kv_cache_dtype], resolved.snapshot_interval
    groups = make_groups(specs, resolved.block_size, itemsize, snapshot_interval=interval, drafts=max_num_drafts > 0)
    names = backend_of_layers(resolved, len(specs), arch.layers_of_each)
    given, in_order = {facts.name: facts for facts in backends}, [resolved.attention_backend, *names]
    facts = {name: given[name] for name in in_order if name in names}  # whose preferences count first
    mixed_pages = pages_differ(groups, itemsize)
    layout = resolve_layout(
        {name: _in_order(fact.layouts, moves_runs=moves_runs) for name, fact in facts.items()},
        requested=resolved.kv_cache_layout,
        mixed_pages=mixed_pages,
    )
    supported = {name: fact.kernel_block_sizes for name, fact in facts.items()}
    try:
        tables = choose_tables(groups, names, supported, layout, wanted=resolved.kernel_block_size)
    except ValueError:
        for name, fact in facts.items():
            if fact.wrong_device:  # the nearer reason: no size of a block would help
                raise ConfigError("attention_backend", name, fact.wrong_device) from None
        raise
    plan = plan_memory(
        arch,
        resolved,
        _zeroed(groups, tables, facts),
        free_bytes,
        weight_bytes=weight_bytes,
        total_bytes=total_bytes,
        weights_loaded=weights_loaded,
        layout=layout.name,
        tables=tables,
        buffer_bytes=buffer_bytes(tables),
        max_num_drafts=max_num_drafts,
        num_lookahead=num_lookahead,
        why={
            "layout": _why_layout(resolved, layout, [*facts], mixed_pages=mixed_pages, moves_runs=moves_runs),
            **_of_prefixes(resolved, groups, max(block_bytes(groups, itemsize), 1)),
        },
    )
    return dataclasses.replace(plan, limits=msgspec.structs.replace(plan.limits, num_next_tokens=num_next_tokens))


def _zeroed(
    groups: Sequence[CacheGroup], tables: Sequence[TableSpec], facts: Mapping[str, BackendFacts]
) -> list[CacheGroup]:
    """The groups, with fresh blocks zeroed where a backend reads what nobody has written."""
    attention = [table for table in tables if table.backend]
    uninitialized_groups = {table.group for table in attention if facts[table.backend].reads_uninitialized}
    return [
        dataclasses.replace(group, zero_fresh_blocks=True) if index in uninitialized_groups else group
        for index, group in enumerate(groups)
    ]


def _of_prefixes(resolved: Resolved, groups: Sequence[CacheGroup], bytes_per_block: int) -> dict[str, str]:
    """What is to be known of prefix caching: why there is none, what a kept state takes."""
    found = {}
    if resolved.enable_prefix_caching and (lost := lost_prefixes(groups)):
        _LOG.warning("no prefix is cached: %s", lost)
        found["enable_prefix_caching"] = lost
    blocks = sum(group.parts.blocks for group in groups if group.kind == "state")
    if blocks and resolved.enable_prefix_caching and not lost_prefixes(groups):
        every = (
            f"every {resolved.snapshot_interval} chunks" if resolved.snapshot_interval else "at a request's end alone"
        )
        size = show_bytes(blocks * bytes_per_block)
        found["snapshot_interval"] = f"a state that is kept, {every}, takes {blocks} blocks, {size}"
    return found


def _in_order(layouts: Sequence[str], *, moves_runs: bool) -> Sequence[str]:
    """Those of a backend, the preferred first: a block in one run, where a connector moves runs."""
    return sorted(layouts, key=lambda name: layout_by_name(name).layer_compact) if moves_runs else layouts


def _why_layout(
    resolved: Resolved, layout: Layout, names: Sequence[str], *, mixed_pages: bool, moves_runs: bool
) -> str:
    if resolved.kv_cache_layout is not None:
        return "as kv_cache_layout says"
    of_pages = " for pages of several sizes" if mixed_pages else ""
    in_runs = (
        " with a block in one run" if moves_runs and layout.block_outermost else ""
    )  # else nobody takes such a one
    return f"the first that {', '.join(names[:1])} takes" + (of_pages or in_runs)
