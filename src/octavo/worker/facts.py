"""What a worker says of itself before a cache is planned.

Owns BackendFacts and WorkerFacts: plain data, which may come from another process. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from octavo.cache.kernel_blocks import KernelBlockSizes
from octavo.cache.specs import LayerSpec
from octavo.config.engine_config import Resolved
from octavo.request.fields import FieldSpec


class BackendFacts(NamedTuple):
    """What an attention backend states, as far as a cache is planned by it."""

    name: str
    layouts: tuple[str, ...]  # of the cache, the preferred first
    kernel_block_sizes: KernelBlockSizes  # tokens per block that it takes
    reads_uninitialized: bool  # loads slots that no token has written
    wrong_device: str  # why it does not run on this device; empty: it does


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A worker with a model, before it has a cache."""

    resolved: Resolved  # with what the model's layers and its mods decided
    layer_specs: Sequence[LayerSpec]  # what each layer keeps
    backends: Sequence[BackendFacts]  # those that `resolved` names
    weight_bytes: int
    free_bytes: int  # of the device, with the weights in it
    total_bytes: int
    request_fields: tuple[FieldSpec, ...]  # what mods read of a request
    num_drafts: int  # that its speculator proposes per row, at most
    num_lookahead: int  # tokens behind a step's last one that the speculator's layers are written for
    num_next_tokens: int  # see Speculator
    compiles_ahead: bool  # what its steps launch can be compiled before the first
    native: str  # instruction set of its compiled operators, or "none"
    gpu: str  # its name; empty: none


def backend_of_layers(resolved: Resolved, num_layers: int, layers_of_each: int) -> list[str]:
    """The name of each layer's backend. Raises ValueError for a layer that the model has not.

    layers_of_each: see Arch. The settings name published layers.
    """
    names, last = [resolved.attention_backend] * num_layers, num_layers // layers_of_each - 1
    for name, layers in resolved.layer_backends.items():
        for layer in layers:
            if not 0 <= layer <= last:
                raise ValueError(
                    f"attention_config layer_backends names layer {layer}: the model has layers 0 to {last}"
                )
            first = layer * layers_of_each
            names[first : first + layers_of_each] = [name] * layers_of_each
    return names


def least(facts: Sequence[WorkerFacts]) -> WorkerFacts:
    """One worker's facts that hold for all: the least free memory, the largest weights."""
    return msgspec.structs.replace(
        facts[0],
        weight_bytes=max(own.weight_bytes for own in facts),
        free_bytes=min(own.free_bytes for own in facts),
        total_bytes=min(own.total_bytes for own in facts),
        compiles_ahead=all(own.compiles_ahead for own in facts),
    )
