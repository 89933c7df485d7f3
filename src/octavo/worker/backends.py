"""A worker's attention backends: what they state, what they keep for themselves, and the ones that run.

Owns the way from a backend's name to its class. Holds nothing afterwards. Invariant: a backend that is not known, or
does not load, is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from octavo.attention.base import BACKENDS, AttentionBackend, Capability, Setup
from octavo.attention.frame import wrong_device
from octavo.cache.groups import TableSpec
from octavo.cache.plan import CachePlan
from octavo.cache.pool import KVCachePool
from octavo.cache.specs import LayerSpec, StateSpec, distinct
from octavo.config.engine_config import Resolved
from octavo.config.settings import ConfigError
from octavo.worker.facts import BackendFacts, backend_of_layers


def capability(name: str) -> Capability:
    """What the backend called `name` states. Raises ConfigError for one that is not known or does not load."""
    try:
        found: Capability = BACKENDS.resolve(name).capability
    except ValueError as error:
        raise ConfigError("attention_backend", name, str(error)) from None
    return found


def backend_facts(resolved: Resolved, num_layers: int, layers_of_each: int = 1) -> list[BackendFacts]:
    """What the backends of the layers state. Raises ConfigError."""
    found = []
    for name in dict.fromkeys(backend_of_layers(resolved, num_layers, layers_of_each)):
        facts = capability(name)
        wrong = "" if resolved.device in facts.devices else wrong_device(name, facts, resolved.device)
        found.append(BackendFacts(name, facts.layouts, facts.kernel_block_sizes, facts.reads_uninitialized, wrong))
    return found


def backend_classes(resolved: Resolved, num_layers: int, layers_of_each: int) -> list[type[AttentionBackend]]:
    """Of each layer."""
    return [BACKENDS.resolve(name) for name in backend_of_layers(resolved, num_layers, layers_of_each)]


def compiles_ahead(resolved: Resolved, names: Sequence[str], specs: Iterable[LayerSpec] = ()) -> bool:
    """Whether what steps with these backends launch can be compiled by steps that launch nothing.

    Not where a layer with states waits for the device: such steps compute nothing that it could look at.
    """
    waits = any(isinstance(spec, StateSpec) and not spec.in_graphs for spec in specs)
    if resolved.device != "cuda" or waits:
        return False
    return all(capability(name).compiles_ahead for name in names)


def buffer_bytes(resolved: Resolved, tables: Sequence[TableSpec]) -> int:
    """What the backends keep for themselves, counted as one spec each."""
    total = 0
    for table in tables:
        if not table.backend:
            continue
        setup = Setup(
            max_num_rows=resolved.max_num_seqs,
            max_num_tokens=resolved.max_num_batched_tokens,
            max_model_len=resolved.max_model_len,
            block_size=table.kernel_block_size or 0,
            options=resolved.attention_options,
        )
        total += capability(table.backend).buffer_bytes(setup)
    return total


def make_backends(
    layer_specs: Sequence[LayerSpec],
    resolved: Resolved,
    plan: CachePlan,
    pool: KVCachePool,
    fields: Mapping[str, torch.Tensor],
) -> list[AttentionBackend]:
    """One backend per block table of attention: these come first. fields: what mods read, per name by row."""
    device, dtype = torch.device(resolved.device), getattr(torch, resolved.dtype)
    backends = []
    for table, block_map in zip(plan.tables, pool.block_maps, strict=True):
        if not table.backend:
            continue
        setup = Setup(
            max_num_rows=plan.limits.max_num_rows,
            max_num_tokens=plan.limits.max_num_tokens,
            max_model_len=plan.limits.max_model_len,
            num_blocks=pool.views[table.layers[0]].shape[0],
            block_size=block_map.kernel_block_size,
            reproducible=resolved.numerics == "reproducible",
            cache_dtype=pool.buffer.dtype,
            options=resolved.attention_options,
            fields=fields,
        )
        specs = distinct(layer_specs, table.layers)
        backends.append(BACKENDS.resolve(table.backend)(specs, dtype, device, setup))
    return backends
