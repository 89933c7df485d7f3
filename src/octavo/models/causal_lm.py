"""CausalLM: what the families share unchanged around their layers.

Owns the last norm, the embedding, the output head, their weights' names and the run from tokens to logits. Does not
know what a layer is made of: a family builds its layers. Invariant: layers stand in order, each with its number as its
attention's index.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import nn

from octavo.attention.base import AttentionBackend
from octavo.cache.specs import LayerSpec
from octavo.checkpoint.arch import Arch
from octavo.layers.attention import RotaryTable
from octavo.layers.base import Layer
from octavo.layers.decoder import Decoder
from octavo.layers.embedding import head_and_embedding
from octavo.layers.norm import RMSNorm
from octavo.models.base import WeightMap, end_weights
from octavo.ops.sampling import draw


class CausalLM(Layer):
    """The ends of a decoder-only model; see models.base.Model."""

    ignored_weights: Sequence[str] = ("*.rotary_emb.inv_freq", "lm_head.weight")
    stacked_weights: Mapping[str, Sequence[str]] = {}
    other_prefixes: Mapping[str, str] = {}
    trainer_names: Mapping[str, str] = {}
    norm_offset = 0.0  # of the last norm, as RMSNorm's

    def __init__(
        self,
        arch: Arch,
        dtype: torch.dtype,
        specs: Sequence[LayerSpec],
        rotary: Iterable[RotaryTable],
        layers: Iterable[Layer],
        weights: WeightMap,
    ) -> None:
        """specs: per layer. rotary: the tables that the layers turn by. weights: of the layers and the last norm."""
        super().__init__()
        self.arch = arch
        self.layer_specs: Sequence[LayerSpec] = specs
        self.rotary, self.layers = nn.ModuleList(rotary), nn.ModuleList(layers)
        self.norm: Layer = RMSNorm(arch.hidden_size, arch.norm_eps, self.norm_offset)
        self.head, self.embedding = head_and_embedding(arch, dtype)
        self.weight_map = {**weights, **end_weights(tied=arch.tied)}

    @functools.cached_property
    def _decoder(self) -> Decoder:
        return Decoder(self.run_layers(), self.norm)

    @property
    def waits_by_layer(self) -> bool:
        """See models.base.Model."""
        return type(self).forward is CausalLM.forward

    def run_layers(self) -> Iterable[nn.Module]:
        """What runs in order, one for each of `layer_specs`."""
        return self.layers

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states after the last norm."""
        return self._decoder.forward(self.embedding.forward(input_ids), positions)

    def describe_layers(self, backends: Sequence[type[AttentionBackend]]) -> list[tuple[str, str]]:
        """See models.base.Model."""
        if not self.waits_by_layer:
            return [("all steps", "the family's own run over its layers")]
        return self._decoder.describe(backends, self.arch.layers_of_each)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits in float32, soft-capped if the checkpoint asks for it."""
        return self.head.forward(hidden)

    def draw(
        self,
        hidden: torch.Tensor,
        rows: torch.Tensor,
        temperatures: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and failures, as `ops.sampling.draw` has them."""
        if self._has_own_logits:
            return draw(self.logits(hidden), rows, temperatures, seeds, positions)
        return self.head.draw(hidden, rows, temperatures, seeds, positions)

    def fused_sampling_rows(self) -> Collection[int]:
        """The numbers of rows whose logits are not written where they are drawn from."""
        return () if self._has_own_logits else self.head.fused_sampling_rows()

    @functools.cached_property
    def _has_own_logits(self) -> bool:
        """Whether a family's logits are not its head's, which alone the head draws from."""
        return type(self).logits is not CausalLM.logits
