"""Model: what the engine and the loader ask of every family.

Owns the protocol and the meaning of a weight map. Knows no family. Invariant: what a family's layers are and how its
weights are called is whole in its own file; what families share is in layers, and around the layers in causal_lm.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch

from octavo.attention.base import AttentionBackend
from octavo.cache.specs import LayerSpec
from octavo.checkpoint.arch import Arch

WeightMap = dict[str, tuple[str, str]]
"""Checkpoint name -> (parameter of the model, shard of it; "" for the whole, fused or not). A `*` stands for a number,
the same one on both sides, in order. Entries for parameters that a model does not have (biases) are allowed."""


def with_numbers(pattern: str, numbers: Sequence[str]) -> str:
    """A name by its pattern: the numbers stand for its stars, in order."""
    first, *rest = pattern.split("*")
    return first + "".join(number + part for number, part in zip(numbers, rest, strict=True))


class Loadable(Protocol):
    """What is built on the meta device, to be filled by `octavo.checkpoint.loader.fill_model`: a tree of layers."""

    arch: Arch
    layer_specs: Sequence[LayerSpec]  # per layer
    weight_map: WeightMap
    ignored_weights: Sequence[str]  # checkpoint names that may be there and are not read; `*` stands for anything
    # checkpoint names that hold a layer's experts together, [experts, rows, columns], with a `*` for the layer -> what
    # each expert's rows are called, in order, with a second `*` for the expert
    stacked_weights: Mapping[str, Sequence[str]]
    other_prefixes: Mapping[str, str]  # by which some checkpoints begin names -> what these maps begin them by


class Model(Loadable, Protocol):
    """A decoder.

    It asks of a step no more than tokens, positions and, in its attention layers, the ForwardContext.
    """

    # what transformers' model in memory calls a weight -> what its checkpoints call it, with a `*` for the layer
    trainer_names: Mapping[str, str]

    @property
    def waits_by_layer(self) -> bool:
        """Whether `forward` passes, ahead of each layer, the gate that the context has for it."""

    def __init__(self, arch: Arch, dtype: torch.dtype) -> None:
        """`dtype`: of activations, and of weights before packing."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """input_ids, positions [tokens] int64 -> hidden states after the final norm, [S, hidden_size].

        Of the last token of each row, if the ForwardContext asks for no others, else of all tokens.
        """

    def describe_layers(self, backends: Sequence[type[AttentionBackend]]) -> list[tuple[str, str]]:
        """(steps, what runs the lines of which layers), for people. `backends`: of each layer."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden_size] -> [rows, vocab_size] float32."""

    def draw(
        self,
        hidden: torch.Tensor,
        rows: torch.Tensor,
        temperatures: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `ops.sampling.draw` gives of the logits of hidden [rows, hidden_size]."""

    def fused_sampling_rows(self) -> Collection[int]:
        """The numbers of rows at which `draw` is faster than logits and a draw."""


# How Llama's checkpoints call what its layers hold, and most families' after it: they name what differs.
LLAMA_WEIGHTS: WeightMap = {
    "model.layers.*.input_layernorm.weight": ("layers.*.input_norm.weight", ""),
    "model.layers.*.self_attn.q_proj.weight": ("layers.*.attention.qkv.weight", "q"),
    "model.layers.*.self_attn.k_proj.weight": ("layers.*.attention.qkv.weight", "k"),
    "model.layers.*.self_attn.v_proj.weight": ("layers.*.attention.qkv.weight", "v"),
    "model.layers.*.self_attn.q_proj.bias": ("layers.*.attention.qkv.bias", "q"),
    "model.layers.*.self_attn.k_proj.bias": ("layers.*.attention.qkv.bias", "k"),
    "model.layers.*.self_attn.v_proj.bias": ("layers.*.attention.qkv.bias", "v"),
    "model.layers.*.self_attn.o_proj.weight": ("layers.*.attention.output.weight", ""),
    "model.layers.*.self_attn.o_proj.bias": ("layers.*.attention.output.bias", ""),
    "model.layers.*.post_attention_layernorm.weight": ("layers.*.mlp_norm.weight", ""),
    "model.layers.*.mlp.gate_proj.weight": ("layers.*.mlp.gate_up.weight", "gate"),
    "model.layers.*.mlp.up_proj.weight": ("layers.*.mlp.gate_up.weight", "up"),
    "model.layers.*.mlp.down_proj.weight": ("layers.*.mlp.down.weight", ""),
    "model.layers.*.mlp.gate_proj.bias": ("layers.*.mlp.gate_up.bias", "gate"),
    "model.layers.*.mlp.up_proj.bias": ("layers.*.mlp.gate_up.bias", "up"),
    "model.layers.*.mlp.down_proj.bias": ("layers.*.mlp.down.bias", ""),
    "model.norm.weight": ("norm.weight", ""),
}


# How most checkpoints call what a layer's `mamba` holds.
MAMBA2_WEIGHTS: WeightMap = {
    "model.layers.*.mamba.in_proj.weight": ("layers.*.mamba.project.weight", ""),
    "model.layers.*.mamba.in_proj.bias": ("layers.*.mamba.project.bias", ""),
    "model.layers.*.mamba.conv1d.weight": ("layers.*.mamba.conv.weight", ""),
    "model.layers.*.mamba.conv1d.bias": ("layers.*.mamba.conv.bias", ""),
    "model.layers.*.mamba.A_log": ("layers.*.mamba.scan.A_log", ""),
    "model.layers.*.mamba.dt_bias": ("layers.*.mamba.scan.dt_bias", ""),
    "model.layers.*.mamba.D": ("layers.*.mamba.scan.D", ""),
    "model.layers.*.mamba.norm.weight": ("layers.*.mamba.norm.weight", ""),
    "model.layers.*.mamba.out_proj.weight": ("layers.*.mamba.out.weight", ""),
    "model.layers.*.mamba.out_proj.bias": ("layers.*.mamba.out.bias", ""),
}


# How Bamba and Falcon-H1 call an MLP with its norm, and the last norm.
FEED_FORWARD_WEIGHTS: WeightMap = {
    "model.layers.*.pre_ff_layernorm.weight": ("layers.*.mlp_norm.weight", ""),
    "model.layers.*.feed_forward.gate_proj.weight": ("layers.*.mlp.gate_up.weight", "gate"),
    "model.layers.*.feed_forward.up_proj.weight": ("layers.*.mlp.gate_up.weight", "up"),
    "model.layers.*.feed_forward.down_proj.weight": ("layers.*.mlp.down.weight", ""),
    "model.layers.*.feed_forward.gate_proj.bias": ("layers.*.mlp.gate_up.bias", "gate"),
    "model.layers.*.feed_forward.up_proj.bias": ("layers.*.mlp.gate_up.bias", "up"),
    "model.layers.*.feed_forward.down_proj.bias": ("layers.*.mlp.down.bias", ""),
    "model.final_layernorm.weight": ("norm.weight", ""),
}


def end_weights(*, tied: bool) -> WeightMap:
    """Where `head` and `embedding` of a model have their weights in most checkpoints.

    A tied one may hold `lm_head.weight` as well: a family ignores it.
    """
    if tied:
        return {"model.embed_tokens.weight": ("head.weight", "")}
    return {"model.embed_tokens.weight": ("embedding.weight", ""), "lm_head.weight": ("head.weight", "")}
