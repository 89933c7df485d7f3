"""The scales of a quantized cache: the checkpoint's own, or measured on a fixed text.

Owns that text's pass over the model. Holds nothing afterwards. Invariant: scales follow from the model alone, and are
the same in every run, whether its weights were loaded or given to an engine that runs.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping

import torch

from octavo.attention.base import BACKENDS, AttentionInputs, ForwardContext, Setup, TableContext, forward_context
from octavo.attention.mods import PROMPT_LENGTH
from octavo.attention.mods.choice import request_fields_of
from octavo.cache.layout import LAYOUTS
from octavo.cache.plan import CachePlan
from octavo.cache.pool import KVCachePool
from octavo.cache.specs import distinct
from octavo.config.engine_config import Resolved
from octavo.device.field_tables import FieldTables
from octavo.device.staging import make_queue
from octavo.layers.attention import Attention
from octavo.layers.expert_recorder import unrecorded
from octavo.layers.latent_attention import LatentAttention
from octavo.model_state.default import layer_contexts
from octavo.models.base import Model
from octavo.ops.cache_write.quantize import LIMITS, cache_dtype
from octavo.plan import StepLimits
from octavo.states.base import LayerStates, StateInputs, StateStep, layer_states
from octavo.states.choice import backend_of

_LOG = logging.getLogger(__name__)
CALIBRATION_TOKENS = 64
CALIBRATION_MARGIN = 1.5


def calibrate_kv_scales(model: Model, resolved: Resolved, plan: CachePlan) -> bool:
    """Give each attention layer the scales of a quantized cache, one per KV head for K and for V.

    A float8 cache takes those that the checkpoint has. Others are measured: the largest magnitude that a fixed text of
    CALIBRATION_TOKENS tokens (fewer only if max_model_len is) shows in a head, times CALIBRATION_MARGIN, becomes the
    type's largest number. So the scales follow from the model alone, and are the same in every run.

    To be called again when the weights have changed. Returns whether a scale has: K and V that were stored before mean
    something else then.
    """
    if resolved.kv_cache_dtype not in ("fp8", "int8"):
        return False
    assert isinstance(model, torch.nn.Module), "models are trees of layers"
    layers = [layer for layer in model.modules() if isinstance(layer, Attention | LatentAttention)]
    before = []
    for layer in layers:  # the tensors stay, operators may keep their addresses
        if layer.tensors.key_scale is None:
            shape = 2, layer.spec.num_kv_heads
            key_scale, value_scale = torch.ones(shape, dtype=torch.float32, device=resolved.device)
            layer.tensors = dataclasses.replace(layer.tensors, key_scale=key_scale, value_scale=value_scale)
        before += [scale.clone() for scale in _scales_of(layer)]
        for scale in _scales_of(layer):  # the text's cache has the computing dtype
            scale.fill_(1)
    stored = [layer for layer in layers if layer.stored_scales is not None and resolved.kv_cache_dtype == "fp8"]
    if stored:
        _LOG.info("%d of %d layers have the checkpoint's own cache scales", len(stored), len(layers))
    views = _calibration_cache(model, resolved, plan) if len(stored) < len(layers) else {}
    limit = LIMITS[cache_dtype(resolved.kv_cache_dtype)]
    for layer in layers:
        scales = layer.stored_scales
        if scales is None or layer not in stored:
            largest = views[layer.index].float().abs().amax(dim=(0, 2))  # [heads, channels]
            halves = largest.tensor_split([layer.spec.head_size], dim=1)  # of a latent layer: all, and nothing
            key, value = halves if halves[1].numel() else (largest, largest)
            margin = CALIBRATION_MARGIN / limit
            scales = (key.amax(1) * margin).clamp(min=1e-6), (value.amax(1) * margin).clamp(min=1e-6)
        for scale, own in zip(_scales_of(layer), scales, strict=True):
            scale.copy_(own)
    after = [scale for layer in layers for scale in _scales_of(layer)]
    return not all(torch.equal(*each) for each in zip(before, after, strict=True))


def _scales_of(layer: Attention | LatentAttention) -> tuple[torch.Tensor, torch.Tensor]:
    key_scale, value_scale = layer.tensors.key_scale, layer.tensors.value_scale
    assert key_scale is not None and value_scale is not None, "a quantized cache has scales"
    return key_scale, value_scale


@torch.inference_mode()
def _calibration_cache(model: Model, resolved: Resolved, plan: CachePlan) -> dict[int, torch.Tensor]:
    """What a fixed text leaves in a cache of the computing dtype, by layer: [blocks, heads, tokens, channels]."""
    assert isinstance(model, torch.nn.Module), "models are trees of layers"
    device, dtype = torch.device(resolved.device), getattr(torch, resolved.dtype)
    count = min(CALIBRATION_TOKENS, resolved.max_model_len)
    sizes = {table.kernel_block_size or 1 for table in plan.tables if table.backend} or {1}
    num_blocks = 1 + -(-count // min(sizes))
    pool = KVCachePool(
        plan.groups,
        num_blocks=num_blocks * len(plan.groups) + 1,
        dtype=dtype,
        device=device,
        layout=LAYOUTS[plan.layout],
        tables=plan.tables,
    )
    pool.buffer.zero_()
    positions = torch.arange(count, device=device)
    contexts: list[TableContext] = []
    written = []
    queue = make_queue(device)
    fields = FieldTables(
        request_fields_of(model.layer_specs),
        StepLimits(max_num_rows=1, max_num_tokens=count, max_model_len=count),
        device=device,
        queue=queue,
        known={PROMPT_LENGTH.spec.name: torch.full((2,), count, dtype=torch.int32, device=device)},
    )
    fields.add(0, None)
    queue.apply()
    for table, block_map in zip(plan.tables, pool.block_maps, strict=True):
        if not table.backend:
            continue
        size = block_map.kernel_block_size
        blocks = range(1 + table.group * num_blocks, 1 + (table.group + 1) * num_blocks)
        ids = torch.tensor([block_map.expand(blocks)], dtype=torch.int32, device=device)
        setup = Setup(
            max_num_rows=1,
            max_num_tokens=count,
            max_model_len=count,
            block_size=size,
            num_blocks=pool.views[table.layers[0]].shape[0],
            options=resolved.attention_options,
            fields=fields.data,
        )
        backend = BACKENDS.resolve(table.backend)(distinct(model.layer_specs, table.layers), dtype, device, setup)
        contexts.append(TableContext(backend))
        contexts[-1].prepare(_whole_prompt(ids, size, positions), for_capture=False)
        written.append(ids[0].long())
    layers = layer_contexts(model.layer_specs, contexts, pool, _states_of(model, pool, positions))
    context = ForwardContext(layers=layers, tables=contexts, positions=positions)
    with forward_context(context), unrecorded(model):
        model.forward((positions * 7919 + 1) % model.arch.vocab_size, positions)
    return {layer: pool.views[layer][written[group]] for layer, group in enumerate(pool.group_of_layer) if group >= 0}


def _whole_prompt(block_table: torch.Tensor, block_size: int, positions: torch.Tensor) -> AttentionInputs:
    """A step with one row, all of whose tokens are computed."""
    count, device = len(positions), positions.device
    return AttentionInputs(
        num_rows=1,
        num_tokens=count,
        max_query_len=count,
        max_seq_len=count,
        block_size=block_size,
        query_start=torch.tensor([0, count], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([count], dtype=torch.int32, device=device),
        block_table=block_table,
        slot_mapping=block_table[0, positions // block_size].long() * block_size + positions % block_size,
        rows=torch.zeros(1, dtype=torch.int64, device=device),
    )


def _states_of(model: Model, pool: KVCachePool, positions: torch.Tensor) -> Mapping[int, LayerStates]:
    """Of a step of one row from its beginning on, with tables in which nothing is kept."""
    step, start = StateStep(), torch.tensor([0, len(positions)], dtype=torch.int32, device=positions.device)
    views = (*pool.states.values(), *pool.inputs.values())
    columns = len(positions) * max((view.parts.blocks for view in views), default=0)
    nothing = [start.new_zeros(1, columns) for _ in pool.tables]
    step.prepare(
        StateInputs(
            max_query_len=len(positions),
            max_seq_len=len(positions),
            rows=positions[:1] * 0,
            query_start=start,
            seq_lens=start[1:],
            positions=positions,
        )
    )
    return layer_states(model.layer_specs, pool, nothing, step, backend_of(pool))
