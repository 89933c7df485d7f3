"""The cache of an engine: from settings to a layout, block tables, bytes and attention backends.

Owns the choice of a backend per layer, the one layout and the kernel block sizes that suit all of them, and the scales
of a quantized cache. Holds nothing afterwards. Invariant: a setting is met or refused by name, never dropped.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from octavo.attention.base import (
    BACKENDS,
    AttentionBackend,
    AttentionInputs,
    Capability,
    ForwardContext,
    Setup,
    TableContext,
    forward_context,
)
from octavo.attention.frame import wrong_device
from octavo.attention.mods import NO_MODS, PROMPT_LENGTH, AttentionMods
from octavo.attention.mods.choice import check_mods_supported, request_fields_of, with_mods
from octavo.cache.groups import CacheGroup, TableSpec, pages_differ
from octavo.cache.kernel_blocks import choose_tables
from octavo.cache.layout import Layout, resolve_layout
from octavo.cache.pool import KVCachePool
from octavo.cache.specs import AttentionSpec, attention_specs, distinct
from octavo.config.engine_config import EngineConfig, Resolved
from octavo.config.settings import ConfigError
from octavo.device.field_tables import FieldTables
from octavo.layers.attention import Attention
from octavo.layers.latent_attention import LatentAttention
from octavo.model_state.default import layer_contexts
from octavo.models.base import Model
from octavo.ops.cache_write.quantize import LIMITS
from octavo.plan import StepLimits
from octavo.startup.memory_plan import ITEMSIZE

_LOG = logging.getLogger(__name__)
CALIBRATION_TOKENS = 64
CALIBRATION_MARGIN = 1.5
CACHE_DTYPES = {"fp8": torch.float8_e4m3fn}  # the others go by torch's names


class KVCacheLayoutPlan(NamedTuple):
    """How the cache lies and who reads it."""

    groups: tuple[CacheGroup, ...]
    layout: Layout
    tables: list[TableSpec]


def choose_form(resolved: Resolved, groups: Sequence[CacheGroup]) -> KVCacheLayoutPlan:
    """The layout and the block tables that suit all backends. Raises ValueError, naming what each takes."""
    num_layers = sum(len(group.layers) for group in groups)
    names = backend_of_layers(resolved, num_layers)
    in_order = dict.fromkeys([resolved.attention_backend, *names])  # whose preferences count first
    facts = {name: capability(name) for name in in_order if name in names}
    layout = resolve_layout(
        {name: fact.layouts for name, fact in facts.items()},
        requested=resolved.kv_cache_layout,
        mixed_pages=pages_differ(groups, ITEMSIZE[resolved.kv_cache_dtype]),
    )
    supported = {name: fact.kernel_block_sizes for name, fact in facts.items()}
    try:
        tables = choose_tables(groups, names, supported, layout, wanted=resolved.kernel_block_size)
    except ValueError:
        for name, fact in facts.items():
            if resolved.device not in fact.devices:  # the nearer reason: no size of a block would help
                raise ConfigError("attention_backend", name, wrong_device(name, fact, resolved.device)) from None
        raise
    uninitialized_groups = {table.group for table in tables if facts[table.backend].reads_uninitialized}
    zeroed = (
        dataclasses.replace(g, zero_fresh_blocks=True) if i in uninitialized_groups else g for i, g in enumerate(groups)
    )
    return KVCacheLayoutPlan(tuple(zeroed), layout, tables)


def apply_mods(model: Model, mods: Sequence[AttentionMods], config: EngineConfig, resolved: Resolved) -> Resolved:
    """Make the model's specs final: those of layers that attend get the layer's mods.

    Gives `resolved` with a backend that runs them. Raises ConfigError where there is none.
    """
    if any(own is not NO_MODS for own in mods):
        names = ", ".join(dict.fromkeys(own.name for own in mods))
        resolved = dataclasses.replace(resolved, attention_options={**resolved.attention_options, "mods": names})
    model.layer_specs = [
        with_mods(spec, own) if isinstance(spec, AttentionSpec) else spec
        for spec, own in zip(model.layer_specs, mods, strict=True)
    ]
    assert isinstance(model, torch.nn.Module), "models are trees of layers"
    for layer in model.modules():
        if isinstance(layer, Attention):
            spec = model.layer_specs[layer.index]
            assert isinstance(spec, AttentionSpec), "a layer with attention has attention's spec"
            layer.spec = spec
    return check_mods_supported(config, resolved, attention_specs(model.layer_specs))


def backend_of_layers(resolved: Resolved, num_layers: int) -> list[str]:
    """The name of each layer's backend. Raises ValueError for a layer that the model has not."""
    names = [resolved.attention_backend] * num_layers
    for name, layers in resolved.layer_backends.items():
        for layer in layers:
            if not 0 <= layer < num_layers:
                raise ValueError(
                    f"attention_config layer_backends names layer {layer}: the model has layers 0 to {num_layers - 1}"
                )
            names[layer] = name
    return names


def capability(name: str) -> Capability:
    """What the backend called `name` states. Raises ConfigError for one that is not known or does not load."""
    try:
        found: Capability = BACKENDS.resolve(name).capability
    except ValueError as error:
        raise ConfigError("attention_backend", name, str(error)) from None
    return found


def cache_dtype(resolved: Resolved) -> torch.dtype:
    """Of the cache's elements."""
    found: torch.dtype = CACHE_DTYPES.get(resolved.kv_cache_dtype) or getattr(torch, resolved.kv_cache_dtype)
    return found


def make_backends(
    model: Model, resolved: Resolved, form: KVCacheLayoutPlan, pool: KVCachePool, fields: FieldTables
) -> list[AttentionBackend]:
    """One backend per block table."""
    device, dtype = torch.device(resolved.device), getattr(torch, resolved.dtype)
    backends = []
    for table, block_map in zip(form.tables, pool.block_maps, strict=True):
        specs = distinct(model.layer_specs, table.layers)
        setup = Setup(
            max_num_rows=resolved.max_num_seqs,
            max_num_tokens=resolved.max_num_batched_tokens,
            max_model_len=resolved.max_model_len,
            num_blocks=pool.views[table.layers[0]].shape[0],
            block_size=block_map.kernel_block_size,
            reproducible=resolved.numerics == "reproducible",
            cache_dtype=pool.buffer.dtype,
            options=resolved.attention_options,
            fields=fields.data,
        )
        backends.append(BACKENDS.resolve(table.backend)(specs, dtype, device, setup))
    return backends


def buffer_bytes(resolved: Resolved, form: KVCacheLayoutPlan) -> int:
    """What the backends keep for themselves, counted as one spec each."""
    total = 0
    for table in form.tables:
        setup = Setup(
            max_num_rows=resolved.max_num_seqs,
            max_num_tokens=resolved.max_num_batched_tokens,
            max_model_len=resolved.max_model_len,
            block_size=table.kernel_block_size or 0,
            options=resolved.attention_options,
        )
        total += capability(table.backend).buffer_bytes(setup)
    return total


def attention_names(resolved: Resolved) -> str:
    """The backends, their options and users' mods, for people and for the numerics contract."""
    others = [f"{name} in layers {list(layers)}" for name, layers in resolved.layer_backends.items() if layers]
    options = [f"{name}={value}" for name, value in sorted(resolved.attention_options.items()) if name != "backend"]
    return ", ".join([resolved.attention_backend, *others, *options])


def calibrate_kv_scales(model: Model, resolved: Resolved, form: KVCacheLayoutPlan) -> None:
    """Give each attention layer the scales of a quantized cache, one per KV head for K and for V.

    A float8 cache takes those that the checkpoint has. Others are measured: the largest magnitude that a fixed text of
    CALIBRATION_TOKENS tokens (fewer only if max_model_len is) shows in a head, times CALIBRATION_MARGIN, becomes the
    type's largest number. So the scales follow from the model alone, and are the same in every run.
    """
    if resolved.kv_cache_dtype not in ("fp8", "int8"):
        return
    assert isinstance(model, torch.nn.Module), "models are trees of layers"
    layers = [layer for layer in model.modules() if isinstance(layer, Attention | LatentAttention)]
    for layer in layers:  # the tensors stay, operators may keep their addresses
        key_scale, value_scale = torch.ones(2, layer.spec.num_kv_heads, device=resolved.device)
        layer.tensors = dataclasses.replace(layer.tensors, key_scale=key_scale, value_scale=value_scale)
    stored = [layer for layer in layers if layer.stored_scales is not None and resolved.kv_cache_dtype == "fp8"]
    if stored:
        _LOG.info("%d of %d layers have the checkpoint's own cache scales", len(stored), len(layers))
    views = _calibration_cache(model, resolved, form) if len(stored) < len(layers) else []
    limit = LIMITS[cache_dtype(resolved)]
    for layer in layers:
        scales = layer.stored_scales
        if scales is None or layer not in stored:
            largest = views[layer.index].float().abs().amax(dim=(0, 2))  # [heads, channels]
            halves = largest.tensor_split([layer.spec.head_size], dim=1)  # of a latent layer: all, and nothing
            key, value = halves if halves[1].numel() else (largest, largest)
            margin = CALIBRATION_MARGIN / limit
            scales = (key.amax(1) * margin).clamp(min=1e-6), (value.amax(1) * margin).clamp(min=1e-6)
        for scale, own in zip((layer.tensors.key_scale, layer.tensors.value_scale), scales, strict=True):
            assert scale is not None, "a quantized cache has scales"
            scale.copy_(own)


@torch.inference_mode()
def _calibration_cache(model: Model, resolved: Resolved, form: KVCacheLayoutPlan) -> list[torch.Tensor]:
    """What a fixed text leaves in a cache of the computing dtype: per layer [blocks, heads, tokens, channels]."""
    device, dtype = torch.device(resolved.device), getattr(torch, resolved.dtype)
    count = min(CALIBRATION_TOKENS, resolved.max_model_len)
    sizes = {table.kernel_block_size or 1 for table in form.tables}
    num_blocks = 1 + -(-count // min(sizes))
    pool = KVCachePool(
        form.groups,
        num_blocks=num_blocks * len(form.groups) + 1,
        dtype=dtype,
        device=device,
        layout=form.layout,
        tables=form.tables,
    )
    pool.buffer.zero_()
    positions = torch.arange(count, device=device)
    contexts: list[TableContext] = []
    written = []
    fields = FieldTables(
        request_fields_of(model.layer_specs),
        StepLimits(max_num_rows=1, max_num_tokens=count, max_model_len=count),
        device=device,
        known={PROMPT_LENGTH.spec.name: torch.full((2,), count, dtype=torch.int32, device=device)},
    )
    fields.add(0, None)
    fields.apply()
    for table, block_map in zip(form.tables, pool.block_maps, strict=True):
        size = block_map.kernel_block_size
        blocks = range(1 + table.group * num_blocks, 1 + (table.group + 1) * num_blocks)
        ids = torch.tensor([block_map.expand(blocks)], dtype=torch.int32, device=device)
        step = AttentionInputs(
            num_rows=1,
            num_tokens=count,
            max_query_len=count,
            max_seq_len=count,
            block_size=size,
            query_start=torch.tensor([0, count], dtype=torch.int32, device=device),
            seq_lens=torch.tensor([count], dtype=torch.int32, device=device),
            block_table=ids,
            slot_mapping=ids[0, positions // size].long() * size + positions % size,
            rows=torch.zeros(1, dtype=torch.int64, device=device),
        )
        setup = Setup(max_num_rows=1, max_num_tokens=count, max_model_len=count, block_size=size,
                      num_blocks=pool.views[table.layers[0]].shape[0], options=resolved.attention_options,
                      fields=fields.data)  # fmt: skip
        backend = BACKENDS.resolve(table.backend)(distinct(model.layer_specs, table.layers), dtype, device, setup)
        contexts.append(TableContext(backend))
        contexts[-1].prepare(step, for_capture=False)
        written.append(ids[0].long())
    layers = layer_contexts(model.layer_specs, contexts, pool)
    context = ForwardContext(layers=layers, tables=contexts, positions=positions)
    with forward_context(context):
        model.forward((positions * 7919 + 1) % model.arch.vocab_size, positions)
    return [view[written[group]] for view, group in zip(pool.views, pool.group_of_layer, strict=True)]
