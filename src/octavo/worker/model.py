"""A worker's model: built, given its mods and filled.

Owns the order in which that is done, and the refusals that need a built model. Holds nothing afterwards. Invariant: a
model's specs are final before anything is sized by them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from octavo.attention.mods import NO_MODS, AttentionMods
from octavo.attention.mods.check import check_mods
from octavo.attention.mods.choice import check_mods_supported, request_fields_of, with_mods
from octavo.cache.specs import AttentionSpec, LayerSpec, StateSpec, attention_specs, with_state_dtype
from octavo.checkpoint.arch import Arch
from octavo.checkpoint.digest import unseen
from octavo.checkpoint.loader import build_model, fill_model, weight_bytes
from octavo.config.engine_config import SETTINGS, EngineConfig, Resolved
from octavo.config.settings import ConfigError
from octavo.layers.attention import Attention
from octavo.layers.base import Layer
from octavo.layers.embedding import Embedding
from octavo.models.base import Model
from octavo.ops.gemm import LinearWeight
from octavo.ops.native.memory import PACKED_WEIGHTS
from octavo.speculate import Speculator, check_ahead, check_num_drafts, make_speculator, with_method
from octavo.speculate.drafter import build_drafts
from octavo.startup.fresh_pages import FRESH_PAGES
from octavo.startup.memory_plan import check_weights
from octavo.worker.backends import capability
from octavo.worker.device import memory_of
from octavo.worker.facts import backend_of_layers


def build(
    arch: Arch, config: EngineConfig, resolved: Resolved, mods: Sequence[AttentionMods]
) -> tuple[Model, Resolved]:
    """The model with its mods, without weights; and `resolved` with a backend that runs them. Raises ConfigError."""
    shortened = dataclasses.replace(arch, max_position=resolved.max_model_len)  # sizes the rotary tables
    model = build_model(shortened, getattr(torch, resolved.dtype))
    check_state_dtype(model.layer_specs, resolved)
    model.layer_specs = [
        with_state_dtype(spec, resolved.state_dtype) if isinstance(spec, StateSpec) else spec
        for spec in model.layer_specs
    ]
    return model, _without_graphs(model, _apply_mods(model, mods, config, resolved))


def check_state_dtype(specs: Sequence[LayerSpec], resolved: Resolved) -> None:
    """Raises ConfigError where a GPU's kernels differ in the last place of what they make of such states."""
    narrow = resolved.device == "cuda" and resolved.dtype == "float32" and resolved.state_dtype == "bfloat16"
    if narrow and any(isinstance(spec, StateSpec) for spec in specs):
        limit = "on a GPU float32 beside such states has no bits that are the same in every batch"
        raise ConfigError("state_dtype", "bfloat16", limit, "set float32, or dtype='bfloat16'")


def fill(
    model: Model, folder: Path | None, resolved: Resolved, seen: Callable[[str, torch.Tensor], None] = unseen
) -> int:
    """Load the weights, with the operators that are chosen; their bytes. Raises ConfigError, ValueError.

    seen: see fill_model.
    """
    size = weight_bytes(model, resolved)
    check_weights(size, model.arch, resolved, memory_of(resolved)[0] + FRESH_PAGES.num_bytes)
    device = torch.device(resolved.device)
    with PACKED_WEIGHTS.fed_by(FRESH_PAGES.take):
        fill_model(
            model,
            folder,
            resolved.quantization,
            resolved.load_format,
            device=device,
            seed=resolved.seed,
            seen=seen,
            keeps_bfloat16=not resolved.weight_transfer_config,
        )
    FRESH_PAGES.end()
    return size


def matrices(model: Model) -> list[torch.Tensor]:
    """A model's large weights, once it is filled: all that a checkpoint holds but vectors."""
    assert isinstance(model, torch.nn.Module), "models are trees of layers"
    values = [value for layer in model.modules() if isinstance(layer, Layer) for value in vars(layer).values()]
    found = [value.storage for value in values if isinstance(value, LinearWeight)]
    tables = [layer.weight for layer in model.modules() if isinstance(layer, Embedding)]
    return list({tensor.data_ptr(): tensor for tensor in [*found, *tables]}.values())


def build_speculator(model: Model, resolved: Resolved) -> tuple[Speculator, int | None, Resolved]:
    """Who proposes drafts for a model without weights, as the settings say, without weights too.

    The bytes that it will load, None where only it knows; and the settings with the method that its checkpoint says.
    Raises ValueError for what an engine refuses.
    """
    resolved = dataclasses.replace(resolved, speculative=with_method(resolved.speculative))
    speculator = make_speculator(resolved.speculative)
    num_bytes = build_drafts(speculator, model, resolved)
    check_drafts(speculator, model, resolved)
    return speculator, num_bytes, resolved


def check_drafts(speculator: Speculator, model: Model, resolved: Resolved) -> None:
    """Raises ValueError where a query may see tokens behind its own: it would see drafts that are rejected.

    And where drafts may take a row further back than its states are kept, and for a drafter's layers in a cache that
    has no scales for them.
    """
    check_num_drafts(speculator, resolved.speculative)
    chunk = min((spec.chunk for spec in model.layer_specs if isinstance(spec, StateSpec)), default=0)
    check_ahead(speculator, resolved.speculative, resolved.max_model_len, chunk)
    num_drafts = speculator.num_drafts
    if speculator.layer_specs and resolved.kv_cache_dtype != resolved.dtype:
        given = resolved.kv_cache_dtype
        others = [name for name, own in SETTINGS["kv_cache_dtype"].aliases.items() if own == given]
        also = f" ({', '.join(others)} mean the same)" if others else ""  # what was given is read, and its word gone
        limit = f"a drafter's layers have no scales{also}"
        raise ConfigError("kv_cache_dtype", given, limit, "set auto, or no drafter")
    if num_drafts and (resolved.looks_ahead or not all(spec.causal for spec in attention_specs(model.layer_specs))):
        raise ValueError(
            f"num_drafts={num_drafts} needs attention in which no query sees a later token: take a causal model, and "
            "mods that do not look ahead, or no speculator"
        )
    if chunk and 2 * num_drafts >= chunk:
        limit = (
            f"the model has states that advance every {chunk} tokens, and two steps' drafts must be fewer than these"
        )
        change = f"set num_speculative_tokens to at most {(chunk - 1) // 2}"
        raise ConfigError("speculative_config", {"num_speculative_tokens": num_drafts}, limit, change)


def try_mods(model: Model, mods: Sequence[AttentionMods], resolved: Resolved) -> None:
    """Evaluate the mods as far as that is possible without a request. Raises ConfigError."""
    names = backend_of_layers(resolved, len(mods), model.arch.layers_of_each)
    slack = max(capability(name).hint_slack for name in names)
    pairs = zip(mods, model.layer_specs, strict=True)
    layers = [(own, spec) for own, spec in pairs if isinstance(spec, AttentionSpec)]
    check_mods(layers, request_fields_of(model.layer_specs), resolved.max_model_len, resolved.device, slack)


def _without_graphs(model: Model, resolved: Resolved) -> Resolved:
    """`resolved`, with eager steps where what runs a layer with a state waits for the device."""
    specs = enumerate(model.layer_specs)
    layers = [index for index, spec in specs if isinstance(spec, StateSpec) and not spec.in_graphs]
    if not layers or resolved.device != "cuda" or resolved.enforce_eager:
        return resolved
    reason = f"no graph holds a layer with a state: layer {layers[0] // model.arch.layers_of_each}"
    return dataclasses.replace(resolved, enforce_eager=True, why={**resolved.why, "enforce_eager": reason})


def _apply_mods(model: Model, mods: Sequence[AttentionMods], config: EngineConfig, resolved: Resolved) -> Resolved:
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
