"""A family outside of Octavo whose layers differ: some keep a state, some attend, some keep nothing.

The recurrent layer is a decayed sum in the canonical order of an open chunk: a position's result is what the chunk's
formula gives for it, from the state at the border before it and the inputs since. Its sums are of single elements and
in a fixed order, so that a row's bits are its own.
"""

from __future__ import annotations

import dataclasses

import torch

from octavo.attention.base import current_context
from octavo.cache.specs import LayerSpec, NoCache, StateSpec, StateTensor
from octavo.checkpoint.arch import Arch
from octavo.checkpoint.config_reader.checkpoint import read_fields
from octavo.checkpoint.config_reader.families import Family
from octavo.checkpoint.config_reader.fields import Fields
from octavo.layers.attention import Attention, plain_specs, rotary_tables
from octavo.layers.base import Layer
from octavo.layers.chain import line
from octavo.layers.linear import Linear
from octavo.layers.mlp import Mlp
from octavo.layers.norm import RMSNorm
from octavo.models.base import LLAMA_WEIGHTS
from octavo.models.causal_lm import CausalLM

HEADS, WIDTH, DECAY = 3, 20, 0.8125
SCAN = StateSpec(
    states=(StateTensor("sum", (HEADS, WIDTH), "float32"), StateTensor("last", (WIDTH,), "bfloat16")),
    inputs=(StateTensor("value", (HEADS, WIDTH), "float32"), StateTensor("gate", (HEADS,), "bfloat16")),
    chunk=8,
)


def decays(chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What is left of a state at each position of a chunk [chunk], and of each input [chunk, chunk] there."""
    powers = torch.tensor([DECAY**i for i in range(chunk + 1)])
    at = torch.arange(chunk)
    return powers[1:], powers[(at[:, None] - at).clamp(min=0)] * (at[:, None] >= at)


def scan_chunk(
    total: torch.Tensor, last: torch.Tensor, value: torch.Tensor, gate: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A chunk of N rows: (results [N, chunk, HEADS, WIDTH], and the state behind it). Inputs change nothing before."""
    of_state, of_input = decays(value.shape[1])
    found = torch.zeros_like(value)
    for place in range(value.shape[1]):
        gated = value[:, place] * (1 + gate[:, place, :, None].float())
        found = found + of_input[:, place, None, None] * gated[:, None]
    found = total[:, None] * of_state[:, None, None] + found
    before = torch.cat((last[:, None].float(), value[:, :-1, 0].bfloat16().float()), 1)
    return found + 0.25 * before[:, :, None], found[:, -1], value[:, -1, 0].bfloat16()


class DecayedSum(Layer):
    """Layer number `index`."""

    def __init__(self, index: int, size: int, dtype: torch.dtype) -> None:
        """`size`: of the hidden state."""
        super().__init__()
        self.index = index
        self.project = Linear(size, HEADS * WIDTH, dtype)
        self.output = Linear(HEADS * WIDTH, size, dtype)

    @line("own")
    def mix(self, projected: torch.Tensor) -> torch.Tensor:
        """projected [tokens, HEADS * WIDTH] -> the same shape."""
        own = current_context().layers[self.index].states
        step, size = own.inputs, own.chunk
        value = projected.float().unflatten(1, (HEADS, WIDTH))
        gate = value[:, :, 1].bfloat16()
        own.store_inputs((value, gate))
        state, chunk = own.gather_states(), own.gather_open_inputs()
        border, end = step.num_computed // size * size, step.seq_lens
        entries = torch.arange(len(step.rows)).repeat_interleave(step.num_queries)
        result = torch.empty_like(value)
        while bool((border < end).any()):  # a chunk of each row
            place = step.positions - border[entries]
            at = ((place >= 0) & (place < size)).nonzero().flatten()
            chunk[0][entries[at], place[at]] = value[at]
            chunk[1][entries[at], place[at]] = gate[at]
            found, *new = scan_chunk(*state, *chunk)
            result[at] = found[entries[at], place[at]]
            border = border + size
            full = (border <= end).nonzero().flatten()
            state = (new[0], new[1])
            own.store_states(full, border[full], [each[full] for each in state])
            chunk = torch.zeros_like(chunk[0]), torch.zeros_like(chunk[1])
        return result.flatten(1).to(projected.dtype)


class RecurrentLayer(Layer):
    """Norm and decayed sum."""

    def __init__(self, index: int, arch: Arch, dtype: torch.dtype) -> None:
        """Layer number `index` of `arch`."""
        super().__init__()
        self.norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.scan = DecayedSum(index, arch.hidden_size, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> the same shape."""
        scan = self.scan
        projected = scan.project(self.norm(x))
        return x + scan.output(scan.mix(projected))


class AttentionLayer(Layer):
    """Norm and attention."""

    def __init__(self, attention: Attention, arch: Arch) -> None:
        """Of `arch`."""
        super().__init__()
        self.input_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.attention = attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> the same shape."""
        attention = self.attention
        q = attention.rope_and_store(attention.qkv(self.input_norm(x)))
        return x + attention.output(attention.attend(q))


class MlpLayer(Layer):
    """Norm and MLP: nothing is kept."""

    def __init__(self, arch: Arch, dtype: torch.dtype) -> None:
        """Of `arch`."""
        super().__init__()
        self.mlp_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.mlp = Mlp(arch.hidden_size, arch.intermediate_size, arch.activation, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> the same shape."""
        return x + self.mlp(self.mlp_norm(x))


WEIGHT_MAP = {
    **LLAMA_WEIGHTS,
    "model.layers.*.norm.weight": ("layers.*.norm.weight", ""),
    "model.layers.*.scan.project.weight": ("layers.*.scan.project.weight", ""),
    "model.layers.*.scan.output.weight": ("layers.*.scan.output.weight", ""),
}


class RecurrentForCausalLM(CausalLM):
    """`pattern`: r keeps a state, a attends, m keeps nothing."""

    pattern = "rarmrm"
    spec = SCAN

    def __init__(self, arch: Arch, dtype: torch.dtype) -> None:
        """See octavo.models.base.Model."""
        rotary, attention = rotary_tables(arch), plain_specs(arch)
        specs: list[LayerSpec] = []
        layers: list[Layer] = []
        for index, kind in enumerate(self.pattern):
            if kind == "a":
                specs.append(attention[index])
                own = Attention(index, attention[index], rotary[arch.layers[index].rope], arch, dtype)
                layers.append(AttentionLayer(own, arch))
            elif kind == "r":
                specs.append(self.spec)
                layers.append(RecurrentLayer(index, arch, dtype))
            else:
                specs.append(NoCache())
                layers.append(MlpLayer(arch, dtype))
        super().__init__(arch, dtype, specs, rotary.values(), layers, WEIGHT_MAP)

    @classmethod
    def read(cls, fields: Fields) -> Arch:
        """The facts of a checkpoint."""
        return read_fields(fields, Family(usual={"num_hidden_layers": len(cls.pattern)}))


class EndsWithStateForCausalLM(RecurrentForCausalLM):
    """The last layer keeps a state, the first nothing."""

    pattern = "mar"


class StatesAloneForCausalLM(RecurrentForCausalLM):
    """No layer attends."""

    pattern = "rmr"


class LongChunksForCausalLM(RecurrentForCausalLM):
    """A chunk has several blocks of tokens, so that a prefix may end inside."""

    spec = dataclasses.replace(SCAN, chunk=32)


class ZeroedForCausalLM(RecurrentForCausalLM):
    """Its operators may load what nobody has written."""

    spec = dataclasses.replace(SCAN, reads_uninitialized=True)
