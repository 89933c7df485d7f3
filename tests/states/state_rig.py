"""Operators of layers with states, driven step by step over a cache of their own, and their oracles in float64."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from octavo.cache.groups import make_groups
from octavo.cache.layout import LAYOUTS
from octavo.cache.pool import KVCachePool
from octavo.cache.specs import AttentionSpec, LayerSpec, StateSpec
from octavo.layers.recurrent import GatedDeltaRule, Mamba1Scan, Mamba2Scan, Part, ShortConvolution, state_spec
from octavo.ops import scan
from octavo.states.base import LayerStates, StateBackend, StateInputs, StateStep, layer_states
from unpromised import spoil

Tensors = tuple[torch.Tensor, ...]
ATTENTION = AttentionSpec(num_heads=2, num_kv_heads=1, head_size=24, scale=1.0)


@dataclasses.dataclass(frozen=True)
class Case:
    """An operator, what random tokens bring to it, and what it should say of a whole sequence."""

    name: str
    part: Part
    draw: Callable[[torch.Generator, int], Tensors]  # of a sequence, [tokens, ...] each
    run: Callable[[StateBackend, LayerStates, Tensors], torch.Tensor]
    oracle: Callable[[Tensors], torch.Tensor]  # float64


def fill(part: Part, seed: int = 3) -> None:
    """Seeded weights of the sizes that models have, then finalize."""
    random = torch.Generator().manual_seed(seed)
    for name, declared in list(part.named_parameters()):
        shape = declared.shape
        if name == "A_log":
            value = torch.rand(shape, generator=random) * 2.5 - 1.5
        elif name == "dt_bias":
            value = torch.rand(shape, generator=random) * 2 - 3
        else:
            value = torch.randn(shape, generator=random) * 0.5
        part.register_parameter(name, torch.nn.Parameter(value.to(declared.dtype), requires_grad=False))
    part.finalize(None)


def conv_case(dtype: torch.dtype = torch.float32, channels: int = 40, width: int = 4, silu: bool = True) -> Case:
    part = ShortConvolution(0, channels, width, dtype, bias=silu, silu=silu)
    fill(part)

    def oracle(drawn: Tensors) -> torch.Tensor:
        conv = part.operands
        x = torch.nn.functional.pad(drawn[0].double().T, (width - 1, 0))
        bias = None if conv.bias is None else conv.bias.double()
        y = torch.nn.functional.conv1d(x[None], conv.weight.t().double()[:, None], bias, groups=channels)[0].T
        return torch.nn.functional.silu(y) if silu else y

    return Case(
        "conv",
        part,
        lambda random, n: (torch.randn(n, channels, generator=random).to(dtype),),
        lambda backend, own, drawn: backend.short_conv(own, part.operands, *drawn),
        oracle,
    )


def delta_case(
    dtype: torch.dtype = torch.float32, key_heads: int = 2, heads: int = 4, key: int = 24, value: int = 32
) -> Case:
    part = GatedDeltaRule(0, key_heads, heads, key, value, dtype)
    fill(part)

    def draw(random: torch.Generator, n: int) -> Tensors:
        qkv = torch.randn(n, part.channels, generator=random).to(dtype)
        return qkv, torch.randn(n, heads, generator=random).to(dtype), torch.randn(n, heads, generator=random).to(dtype)

    def oracle(drawn: Tensors) -> torch.Tensor:
        rule, (qkv, a, b) = part.operands, (each.double() for each in drawn)
        q, k, v = qkv.split((key_heads * key, key_heads * key, heads * value), 1)
        q, k = (norm_of(each.unflatten(1, (-1, key))).repeat_interleave(heads // key_heads, 1) for each in (q, k))
        v = v.unflatten(1, (-1, value))
        left = (rule.decay.double() * torch.nn.functional.softplus(a + rule.dt_bias.double())).exp()
        state, found = torch.zeros(heads, key, value, dtype=torch.float64), []
        for t in range(len(q)):
            state = state * left[t, :, None, None]
            error = (v[t] - torch.einsum("hkv,hk->hv", state, k[t])) * b[t].sigmoid()[:, None]
            state = state + k[t][..., None] * error[:, None]
            found.append(torch.einsum("hkv,hk->hv", state, q[t] * key**-0.5))
        return torch.stack(found).flatten(1)

    return Case(
        "delta", part, draw, lambda backend, own, drawn: backend.gated_delta(own, part.operands, *drawn), oracle
    )


def norm_of(x: torch.Tensor) -> torch.Tensor:
    return x / ((x * x).sum(-1, keepdim=True) + scan.L2_EPS).sqrt()


def mamba2_case(
    dtype: torch.dtype = torch.float32, heads: int = 4, size: int = 16, groups: int = 2, state_size: int = 24
) -> Case:
    part = Mamba2Scan(0, heads, size, groups, state_size, dtype, dt_limits=(0.001, 2.0))
    fill(part)

    def draw(random: torch.Generator, n: int) -> Tensors:
        return (
            torch.randn(n, part.channels, generator=random).to(dtype),
            torch.randn(n, heads, generator=random).to(dtype),
        )

    def oracle(drawn: Tensors) -> torch.Tensor:
        own, (xbc, dt) = part.operands, (each.double() for each in drawn)
        x, b, c = xbc.split((heads * size, groups * state_size, groups * state_size), 1)
        x = x.unflatten(1, (-1, size))
        b, c = (each.unflatten(1, (-1, state_size)).repeat_interleave(heads // groups, 1) for each in (b, c))
        dt = torch.nn.functional.softplus(dt + own.dt_bias.double()).clamp(own.dt_min, own.dt_max)
        left = (dt * own.decay.double()).exp()
        state, found = torch.zeros(heads, state_size, size, dtype=torch.float64), []
        for t in range(len(x)):
            state = state * left[t, :, None, None] + (dt[t, :, None] * b[t])[..., None] * x[t][:, None]
            found.append(torch.einsum("hsp,hs->hp", state, c[t]) + own.skip.double()[:, None] * x[t])
        return torch.stack(found).flatten(1)

    return Case("mamba2", part, draw, lambda backend, own, drawn: backend.mamba2(own, part.operands, *drawn), oracle)


def mamba1_case(dtype: torch.dtype = torch.float32, channels: int = 48, state_size: int = 8) -> Case:
    part = Mamba1Scan(0, channels, state_size, dtype)
    fill(part)

    def draw(random: torch.Generator, n: int) -> Tensors:
        sizes = (channels, channels, state_size, state_size)
        return tuple(torch.randn(n, size, generator=random).to(dtype) for size in sizes)

    def oracle(drawn: Tensors) -> torch.Tensor:
        own, (x, dt, b, c) = part.operands, (each.double() for each in drawn)
        dt = torch.nn.functional.softplus(dt + own.dt_bias.double())
        state, found = torch.zeros(channels, state_size, dtype=torch.float64), []
        for t in range(len(x)):
            left = (dt[t, :, None] * own.decay.t().double()).exp()
            state = left * state + (dt[t] * x[t])[:, None] * b[t]
            found.append(state @ c[t] + own.skip.double() * x[t])
        return torch.stack(found)

    return Case("mamba1", part, draw, lambda backend, own, drawn: backend.mamba1(own, part.operands, *drawn), oracle)


CASES = {"conv": conv_case, "delta": delta_case, "mamba2": mamba2_case, "mamba1": mamba1_case}


class Rows:
    """Sequences in a cache that is full of NaN, computed by any steps."""

    def __init__(
        self,
        case: Case,
        backend: StateBackend,
        drawn: Sequence[Tensors],
        *,
        block_size: int = 16,
        beside: Sequence[LayerSpec] = (),
        spec: StateSpec | None = None,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        """drawn: of each sequence. beside: other layers, which make blocks larger, ahead of the case's own."""
        self.case, self.backend, self.drawn, self.device = case, backend, drawn, torch.device(device)
        self.spec = spec or state_spec(case.part)
        specs = [*beside, self.spec]
        groups = make_groups(specs, block_size, 4)
        longest = 2 * self.spec.chunk + max(len(each[0]) for each in drawn)
        columns = [max(group.num_blocks(longest), 1) for group in groups]
        count = 1 + len(drawn) * sum(columns)
        self.pool = KVCachePool(
            groups, num_blocks=count, dtype=torch.float32, device=self.device, layout=LAYOUTS["BLHNC"]
        )
        self.pool.buffer.fill_(torch.nan)
        ids = list(range(1, count))
        random.Random(seed).shuffle(ids)
        tables = []
        for width in columns:
            own = [[ids.pop() for _ in range(width)] for _ in drawn]
            tables.append(torch.tensor(own, dtype=torch.int32, device=self.device))
        self.step = StateStep()
        layers = layer_states(specs, self.pool, tables, self.step, backend)
        self.own = layers.pop(len(beside))
        self.others = list(layers.values())  # of the same kind, which are given the same
        self.computed = [0] * len(drawn)
        self.padded = 0  # rows of padding behind those of a step, whose bounds are loose then, as a graph's are
        self.results = [torch.empty(0)] * len(drawn)

    def keep_one_state(self, row: int) -> None:
        """Let the states of a row at all borders have the same blocks, as those of a row that decodes have."""
        blocks = self.own.states[0].blocks
        table = self.own.state_table[row]
        table.copy_(table[:blocks].repeat(len(table) // blocks))

    def compute(self, counts: dict[int, int], spoilt: int = 0) -> None:
        """A step: so many tokens of each row, in the order given. spoilt: as many more follow, which are rejected."""
        brought, starts, lengths, positions = [], [0], [], []
        for row, count in counts.items():
            begin, end = self.computed[row], self.computed[row] + count
            wrong = [torch.full_like(each[:1], 3.25).expand(spoilt, *each.shape[1:]) for each in self.drawn[row]]
            brought.append(
                [torch.cat((each[begin:end], bad)) for each, bad in zip(self.drawn[row], wrong, strict=True)]
            )
            starts.append(starts[-1] + count + spoilt)
            lengths.append(end + spoilt)
            positions += range(begin, end + spoilt)
        several = [count + spoilt > 1 for count in counts.values()]
        rows, bounds = len(several) + self.padded, (several.count(False), several.count(True))
        self.step.prepare(
            StateInputs(
                max_query_len=max(counts.values()) + spoilt,
                max_seq_len=max(lengths),
                rows=torch.tensor([*counts, *[0] * self.padded], device=self.device),
                query_start=torch.tensor(starts + starts[-1:] * self.padded, dtype=torch.int32, device=self.device),
                seq_lens=torch.tensor(lengths + [0] * self.padded, dtype=torch.int32, device=self.device),
                positions=torch.tensor(positions, device=self.device),
                bounds=((rows, rows) if self.padded else bounds) if several == sorted(several) else None,
                verifies=spoilt > 0,
            )
        )
        tokens = tuple(torch.cat(each).to(self.device) for each in zip(*brought, strict=True))
        ahead = [self.case.run(self.backend, other, tokens).cpu() for other in self.others]
        found = self.case.run(self.backend, self.own, tokens).cpu()
        assert all(torch.equal(each, found) for each in ahead), "layers that are alike"
        self.step.finish()
        spoil((self.own, *self.others))
        for start, (row, count) in zip(starts, counts.items(), strict=False):
            self.results[row] = torch.cat((self.results[row], found[start : start + count]))
            self.computed[row] += count


def move(case: Case, device: str) -> None:
    """The operands' weights."""
    operands = case.part.operands
    moved = [each.to(device) if isinstance(each, torch.Tensor) else each for each in operands]
    case.part.__dict__["operands"] = type(operands)(*moved)


def draw_all(case: Case, lengths: Sequence[int], seed: int = 1) -> list[Tensors]:
    return [case.draw(torch.Generator().manual_seed(seed + index), length) for index, length in enumerate(lengths)]


def alone(case: Case, backend: StateBackend, drawn: Sequence[Tensors], **options: Any) -> list[torch.Tensor]:
    """What each sequence gives by itself, in one step."""
    found = []
    for each in drawn:
        rows = Rows(case, backend, [each], **options)
        rows.compute({0: len(each[0])})
        found += rows.results
    return found
