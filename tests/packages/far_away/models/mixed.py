"""A family outside of Octavo made of Octavo's recurrent parts, beside layers that attend to a window and to all."""

from __future__ import annotations

import dataclasses

import torch

from far_away.models.recurrent import AttentionLayer
from octavo.cache.specs import LayerSpec
from octavo.checkpoint.arch import Arch
from octavo.checkpoint.config_reader.checkpoint import read_fields
from octavo.checkpoint.config_reader.families import Family
from octavo.checkpoint.config_reader.fields import Fields
from octavo.layers.attention import Attention, plain_specs, rotary_tables
from octavo.layers.base import Layer
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.layers.recurrent import GatedDeltaRule, Mamba1Scan, Mamba2Scan, ShortConvolution, state_spec
from octavo.models.base import LLAMA_WEIGHTS
from octavo.models.causal_lm import CausalLM

WINDOW, WIDTH = 20, 4
HEADS, KEY, VALUE = 2, 16, 24  # of the gated delta rule, whose keys have one head
GROUPS, HEAD, STATES = 1, 16, 8  # of Mamba-2, which has as many heads
CHANNELS = 24  # of Mamba-1


class Mixer(Layer):
    """Norm, projection, convolution and a scan of layer number `index`."""

    def __init__(self, kind: str, index: int, arch: Arch, dtype: torch.dtype) -> None:
        """`kind`: d, 2 or 1."""
        super().__init__()
        self.kind = kind
        if kind == "d":
            self.scan = GatedDeltaRule(index, 1, HEADS, KEY, VALUE, dtype)
            self.sizes, inner = (self.scan.channels, HEADS, HEADS), HEADS * VALUE
        elif kind == "2":
            self.scan = Mamba2Scan(index, HEADS, HEAD, GROUPS, STATES, dtype)
            self.sizes, inner = (self.scan.channels, HEADS), HEADS * HEAD
        else:
            self.scan = Mamba1Scan(index, CHANNELS, STATES, dtype)
            self.sizes, inner = (CHANNELS, CHANNELS, STATES, STATES), CHANNELS
        self.norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.conv = ShortConvolution(index, self.sizes[0], WIDTH, dtype, bias=True)
        self.project = Linear(arch.hidden_size, sum(self.sizes), dtype)
        self.output = Linear(inner, arch.hidden_size, dtype)
        self.spec = state_spec(self.conv, self.scan)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> the same shape."""
        first, *rest = self.project(self.norm(x)).split(self.sizes, 1)
        return x + self.output(self.scan.mix(self.conv.mix(first), *rest))


WEIGHT_MAP = {
    **LLAMA_WEIGHTS,
    **{
        f"model.layers.*.{name}": (f"layers.*.{name}", "")
        for name in ("norm.weight", "conv.weight", "conv.bias", "project.weight", "output.weight")
    },
    **{f"model.layers.*.scan.{name}": (f"layers.*.scan.{name}", "") for name in ("A_log", "dt_bias", "D")},
}


class MixedForCausalLM(CausalLM):
    """`pattern`: w attends to a window, a to all, d, 2 and 1 keep states."""

    pattern = "dw2a1d"

    def __init__(self, arch: Arch, dtype: torch.dtype) -> None:
        """See octavo.models.base.Model."""
        rotary, attention = rotary_tables(arch), plain_specs(arch)
        specs: list[LayerSpec] = []
        layers: list[Layer] = []
        for index, kind in enumerate(self.pattern):
            if kind in "wa":
                spec = dataclasses.replace(attention[index], window=WINDOW if kind == "w" else 0)
                own = Attention(index, spec, rotary[arch.layers[index].rope], arch, dtype)
                layers.append(AttentionLayer(own, arch))
                specs.append(spec)
            else:
                mixer = Mixer(kind, index, arch, dtype)
                layers.append(mixer)
                specs.append(mixer.spec)
        super().__init__(arch, dtype, specs, rotary.values(), layers, WEIGHT_MAP)

    @classmethod
    def read(cls, fields: Fields) -> Arch:
        """The facts of a checkpoint."""
        return read_fields(fields, Family(usual={"num_hidden_layers": len(cls.pattern)}))


def weight_shapes(kind: str, size: int) -> dict[str, tuple[int, ...]]:
    """Of a mixer's weights, by their checkpoint names. size: of the hidden state."""
    channels = {"d": 2 * KEY + HEADS * VALUE, "2": HEADS * HEAD + 2 * GROUPS * STATES, "1": CHANNELS}[kind]
    inner = {"d": HEADS * VALUE, "2": HEADS * HEAD, "1": CHANNELS}[kind]
    rest = {"d": 2 * HEADS, "2": HEADS, "1": CHANNELS + 2 * STATES}[kind]
    gates = {"d": (HEADS,), "2": (HEADS,), "1": (CHANNELS,)}[kind]
    return {
        "norm.weight": (size,),
        "conv.weight": (channels, 1, WIDTH),
        "conv.bias": (channels,),
        "project.weight": (channels + rest, size),
        "output.weight": (size, inner),
        "scan.A_log": (CHANNELS, STATES) if kind == "1" else gates,
        "scan.dt_bias": gates,
        **({} if kind == "d" else {"scan.D": gates}),
    }
