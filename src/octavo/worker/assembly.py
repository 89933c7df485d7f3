"""A worker's parts, allocated by the plan and wired to a runner.

Owns what is made of which sizes. Holds nothing afterwards. Invariant: everything is as large as the plan says, and made
of nothing else.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch

from octavo.attention.base import Capability
from octavo.attention.mods import PROMPT_LENGTH
from octavo.attention.mods.choice import knows_prompts, request_fields_of
from octavo.cache.layout import LAYOUTS
from octavo.cache.plan import CachePlan
from octavo.cache.pool import KVCachePool
from octavo.cache.specs import attention_specs
from octavo.config.engine_config import Resolved
from octavo.config.speculative import batch_depth, cheap_tokens
from octavo.device.batch import InputBuffers
from octavo.device.block_table import BlockTables
from octavo.device.field_tables import FieldTables
from octavo.device.graphs import ANY_LENGTH, GraphKey, GraphPool, decode_keys, mixed_keys, verify_keys
from octavo.device.request_table import RequestTable
from octavo.device.staging import make_queue
from octavo.grammar.compiler import NO_GRAMMARS, Grammars
from octavo.model_state.default import DefaultModelState
from octavo.models.base import Model
from octavo.ops.arrivals import NO_GATES, Gates, make_gates
from octavo.ops.cache_write.quantize import LIMITS, cache_dtype
from octavo.ops.inputs.tensors import RowTensors
from octavo.ops.placement import Allocate
from octavo.plan import StepLimits
from octavo.sampling.sampler import Sampler
from octavo.speculate import NO_SPECULATOR, Speculator
from octavo.speculate.drafter import Drafter, make_drafter
from octavo.startup.memory_plan import graph_tokens
from octavo.startup.probe import attention_names
from octavo.worker.backends import make_backends
from octavo.worker.runner import Runner

_LOG = logging.getLogger(__name__)


def make_runner(
    model: Model,
    resolved: Resolved,
    plan: CachePlan,
    grammars: Grammars = NO_GRAMMARS,
    speculator: Speculator = NO_SPECULATOR,
    allocate: Allocate | None = None,
    *,
    brings: bool = False,
) -> Runner:
    """Allocate the cache and the tables for `model` and the drafter's layers, and wire them to a runner.

    allocate: whose memory the cache's is; None: torch's. brings: blocks may arrive while a step runs.
    """
    layer_specs = [*model.layer_specs, *speculator.layer_specs]
    device, limits = torch.device(resolved.device), plan.limits
    pool = _make_pool(resolved, plan, device, allocate)
    _give_scales(model, resolved, plan, pool)
    block_sizes = [block_map.kernel_block_size for block_map in pool.block_maps]
    _LOG.info("attention backend %s: %s", attention_names(resolved), resolved.why.get("attention_backend", "chosen"))
    _LOG.info("cache layout %s, blocks of %d, kernel blocks of %s", plan.layout, plan.block_size, block_sizes)
    _LOG.info("%s", plan.capacity())
    queue = make_queue(device)
    requests = RequestTable(limits, device=device, queue=queue)
    tables = BlockTables(
        plan.groups,
        limits,
        device=device,
        block_maps=pool.block_maps,
        sources=[table.group for table in plan.tables],
        queue=queue,
    )
    buffers = InputBuffers(requests, tables, limits, device=device, queue=queue)
    sampler = Sampler(
        limits,
        vocab_size=model.arch.vocab_size,
        device=device,
        tokens=requests.token_ids.data,
        prompt_lens=requests.prompt_len.data,
        logprobs_mode=resolved.logprobs_mode,
        max_logprobs=resolved.max_logprobs,
        grammars=grammars,
        queue=queue,
    )
    ahead = knows_prompts(layer_specs)
    fields = FieldTables(
        request_fields_of(layer_specs),
        limits,
        device=device,
        queue=queue,
        known={PROMPT_LENGTH.spec.name: requests.prompt_len.data} if ahead else {},
    )
    backends = make_backends(layer_specs, resolved, plan, pool, fields.data)
    state = DefaultModelState(layer_specs, backends, pool, fields, [table.data for table in tables.tables])
    keys = _graph_keys(model, resolved, limits, [backend.capability for backend in backends])
    graphs = GraphPool(keys, _gates(model, device) if brings and keys else NO_GATES)
    own = tables, requests.tensors, buffers.block_tables, limits
    drafter = _make_drafter(speculator, model, resolved, *own, state.prepare_drafts, sampler.tables)
    parts = model, state, pool, requests, tables, buffers, sampler, graphs
    return Runner(*parts, writes=queue, drafter=drafter, kept_experts=resolved.kept_experts)


def _make_drafter(
    speculator: Speculator, model: Model, resolved: Resolved, tables: BlockTables, rows: RowTensors, *own: Any
) -> Drafter:
    """own: what DraftBatches takes beside."""
    if speculator is NO_SPECULATOR:
        return Drafter(rows)
    from octavo.speculate.step import DraftBatches

    batches = DraftBatches(tables, rows, *own)
    return make_drafter(speculator, batches, model.arch, getattr(torch, resolved.dtype))


def _give_scales(model: Model, resolved: Resolved, plan: CachePlan, pool: KVCachePool) -> None:
    """Of a quantized cache, before anything is stored in it."""
    if pool.buffer.dtype in LIMITS:
        from octavo.worker.calibration import calibrate_kv_scales

        calibrate_kv_scales(model, resolved, plan)


def _gates(model: Model, device: torch.device) -> Gates:
    return make_gates(len(model.layer_specs), device) if model.waits_by_layer else NO_GATES


def _make_pool(resolved: Resolved, plan: CachePlan, device: torch.device, allocate: Allocate | None) -> KVCachePool:
    return KVCachePool(
        plan.groups,
        num_blocks=plan.num_blocks,
        dtype=cache_dtype(resolved.kv_cache_dtype),
        device=device,
        layout=LAYOUTS[plan.layout],
        tables=plan.tables,
        allocate=allocate,
    )


def _graph_keys(
    model: Model, resolved: Resolved, limits: StepLimits, capabilities: Sequence[Capability]
) -> list[GraphKey]:
    """The steps to capture: those that every attention backend lets a graph hold."""
    if resolved.device != "cuda" or resolved.enforce_eager:
        return []
    needs = {fact for spec in attention_specs(model.layer_specs) for fact in spec.facts}
    if resolved.kv_cache_dtype != resolved.dtype:
        needs.add("cache_dtypes")
    held = frozenset({"decode", "mixed"})
    for facts in capabilities:
        held &= frozenset() if needs & facts.eager else facts.graphs
    rows = resolved.max_num_seqs
    lengths = {n for facts in capabilities for n in facts.graph_lengths if n < resolved.max_model_len}
    decode = decode_keys(rows, sorted(lengths), model.fused_sampling_rows()) if "decode" in held else []
    if "mixed" not in held:
        return decode
    bounded = any(facts.bounded_mixed for facts in capabilities)
    length = min(lengths) if bounded and lengths else ANY_LENGTH
    mixed = mixed_keys(rows, graph_tokens(model.arch, resolved), length, bounded=bounded)
    if bounded or not decode:
        return decode + mixed
    cheap = cheap_tokens(resolved.speculative, resolved.device)
    depth = functools.partial(batch_depth, limits.max_num_drafts, cheap)
    return decode + mixed + verify_keys(rows, limits.max_num_tokens, depth)
