"""Multi-token prediction: a layer of the target's own kind over its last hidden state, as DeepSeek-V3 was trained with.

Owns a module and both forms of its weight map: DeepSeek's and GLM's, where a module stands behind the last layer, and
Qwen3-Next's, under `mtp`. What comes out is normed, and stands where the target's normed state does. Source: arXiv
2412.19437. Invariant: float32 logits within 1e-4 of transformers' MtpModel.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import nn

from octavo.attention.base import current_context
from octavo.cache.specs import LayerSpec
from octavo.checkpoint.arch import Arch, DraftArch
from octavo.layers.attention import Attention
from octavo.layers.base import Layer
from octavo.layers.chain import Line, learn
from octavo.layers.decoder import Decoder
from octavo.layers.embedding import Embedding, OutputHead, embed_with_states
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.models.base import WeightMap
from octavo.models.causal_lm import CausalLM
from octavo.ops.gemm.fused import linear_of_few
from octavo.ops.inputs.tensors import DraftRows
from octavo.ops.sampling.drafts import draw_drafts

_BEHIND_LAYERS = {"enorm": "token_norm", "hnorm": "state_norm", "eh_proj": "combine", "shared_head.norm": "norm"}
_UNDER_MTP = {
    "pre_fc_norm_embedding": "token_norm",
    "pre_fc_norm_hidden": "state_norm",
    "fc": "combine",
    "norm": "norm",
}


class MtpModule(Layer):
    """See models.drafters.DraftHead. Each module of several is one: they share the target's embedding and head."""

    ignored_weights: Sequence[str] = ("*",)  # of other modules and of the target
    stacked_weights: Mapping[str, Sequence[str]]
    other_prefixes: Mapping[str, str]
    taps: Sequence[int] = ()

    def __init__(self, draft: DraftArch, target: CausalLM, dtype: torch.dtype, number: int = 0) -> None:
        """On the meta device. number: of the module, from 0; target: whose kind its layer is."""
        super().__init__()
        arch = self.arch = dataclasses.replace(
            draft.arch,
            layers=tuple(kind for kind in draft.arch.layers if kind.mixer == "attention")[-1:],
            moe_layers=frozenset({0} if draft.arch.moe_layers else ()),  # a target's first layers alone may be dense
        )
        family: Callable[[Arch, torch.dtype], CausalLM] = type(target)
        alone = family(arch, dtype)  # of one layer, like the target's last one that attends
        self.layer_specs: Sequence[LayerSpec] = alone.layer_specs
        self.rotary, self.layer = alone.rotary, cast(Layer, alone.layers[0])
        self.other_prefixes, self.stacked_weights = target.other_prefixes, target.stacked_weights
        size, eps = arch.hidden_size, arch.norm_eps
        offset = target.norm_offset
        self.token_norm, self.state_norm = RMSNorm(size, eps, offset), RMSNorm(size, eps, offset)
        self.combine = Linear(2 * size, size, dtype)
        self.norm = RMSNorm(size, eps, offset)
        self.__dict__["embedding"], self.__dict__["head"] = target.embedding, target.head  # references, not children
        self.weight_map = _weight_map(draft, alone, number)
        self._before, self._store = _lines_to_store(self.layer)

    layer: Layer
    rotary: nn.ModuleList
    head: OutputHead
    embedding: Embedding

    def begin(self, given: torch.Tensor) -> torch.Tensor:
        """The target's hidden states as they are."""
        return given

    def _enter(
        self, tokens: torch.Tensor, states: torch.Tensor, pick: torch.Tensor | None = None, *, behind_draw: bool = False
    ) -> torch.Tensor:
        norms = self.token_norm, self.state_norm
        both, _ = embed_with_states(self.embedding, tokens, states, norms, pick, behind_draw=behind_draw)
        return linear_of_few(both, self.combine.packed)

    @property
    def attends_to_store(self) -> bool:
        """Of a layer which runs as it is written, since nobody knows what else would store its K and V."""
        return self._store is None

    def store(self, tokens: torch.Tensor, states: torch.Tensor) -> None:
        """The lines of the layer that lie before its attention."""
        x = self._enter(tokens, states)
        if self._store is None:
            self.layer.forward(x)
            return
        for line in self._before:
            x = line.run(x)
        self._store(x)

    def forward(
        self, tokens: torch.Tensor, states: torch.Tensor, pick: torch.Tensor | None = None, *, behind_draw: bool = False
    ) -> torch.Tensor:
        """What a next entry knows, and the head's logits follow from: normed."""
        x = self._enter(tokens, states, pick, behind_draw=behind_draw)
        return self._decoder.forward(x, current_context().positions)

    @functools.cached_property
    def _decoder(self) -> Decoder:
        """The layer and the norm, run as the target's."""
        return Decoder([self.layer], self.norm)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """By the target's head."""
        return self.head.forward(states)

    def draw(self, states: torch.Tensor, of: DraftRows) -> torch.Tensor:
        """By their logits."""
        return draw_drafts(self.logits(states), None, of)


def _lines_to_store(layer: Layer) -> tuple[Sequence[Line], Callable[[torch.Tensor], object] | None]:
    """A layer's lines, and what behind them stores K and V: the last of these, or a mixer that is a line as a whole.

    None where its lines are not known, or what they store.
    """
    chain = learn(layer.forward)
    lines = [] if chain is None else chain.lines
    for place, line in enumerate(lines):
        if line.kind == "attend":
            return lines[: place - 1], lines[place - 1].run
        if line.kind == "own" and isinstance(line.owner, Attention) and line.run == line.owner.forward:
            return (lines[:place], line.owner.store) if _stores_as_it_runs(line.owner) else ((), None)
    return (), None


def _stores_as_it_runs(mixer: Attention) -> bool:
    """Whether whoever wrote its forward knew of its `store`: another forward may bring other K and V."""
    first = next(kind for kind in type(mixer).__mro__ if "forward" in vars(kind) or "store" in vars(kind))
    return "store" in vars(first) and "forward" not in vars(mixer)


def _weight_map(draft: DraftArch, alone: CausalLM, number: int) -> WeightMap:
    """Of one module: the family's names, of a layer that has another place."""
    behind = f"model.layers.{draft.arch.num_layers + number}."
    own, place = (_UNDER_MTP, "mtp.") if draft.under_mtp else (_BEHIND_LAYERS, behind)
    found: WeightMap = {place + f"{name}.weight": (f"{target}.weight", "") for name, target in own.items()}
    layer = f"mtp.layers.{number}." if draft.under_mtp else place
    for name, (parameter, shard) in alone.weight_map.items():
        if name.startswith("model.layers.*.") and parameter.startswith("layers.*."):
            found[layer + name.removeprefix("model.layers.*.")] = "layer." + parameter.removeprefix("layers.*."), shard
    return found
