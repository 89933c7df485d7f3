"""Benchmark of a layer of experts on a GPU: `python bench/kernel.py experts [--sweep TOKENS]`.

The layer is Qwen3-Next's: 512 experts of 512 on 2,048 channels, 10 of them for a token. Counts what steps of several
sizes need: the bytes of the experts that they meet, rows and results, against a copy's, and the operations of their
pairs against a large product's. --sweep: every tile in the list beside that of the table, for one step's size; their
bits are compared with each other's. Launches are timed in a CUDA graph, each with another choice of experts.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from cuda_attention import measure_limits, seconds
from octavo.checkpoint.arch import Moe
from octavo.ops.activation import gated_activation
from octavo.ops.gemm import LinearWeight, linear
from octavo.ops.gemm.gpu import Tile
from octavo.ops.moe import ExpertWeights, run_experts
from octavo.ops.moe import gpu as moe
from octavo.ops.moe.routing import choose_experts, choose_experts_reference, sum_experts, sum_experts_reference

SIZE, EXPERTS, RANKS, INNER = 2048, 512, 10, 512
TOKENS = (1, 8, 64, 256, 512, 2048, 8192)
RULE = Moe(num_experts=EXPERTS, experts_per_token=RANKS, expert_size=INNER)
# Tiles by the steps that they are tried for, as `tile_of` reads them.
_FEW = "8x16x256/1/4s 8x32x128/2/4s 8x32x256/2/3s 8x32x256/2/4s 8x64x64/4/6s 8x64x128/4/3s 8x64x128/4/4s 8x64x256/4/3s"
_FEW += " 8x128x64/4/4s 8x128x128/4/3s"
_SOME = "16x64x128/4/3s 16x64x128/4/4s 16x64x256/4/3s 16x64x128/4/4 16x128x64/4/4s 16x128x128/4/3s"
_MORE = "32x64x128/4/3s 32x64x128/4/4s 32x128x64/4/4s 32x128x128/4/3s 32x128x64/8/4s 32x256x64/8/4s"
_MANY = "64x128x64/4/3 64x128x64/4/2 64x128x128/4/2 64x256x64/8/2 64x256x64/4/2 64x256x64/8/3 64x128x64/4/3s"
_MANY += " 128x128x64/8/3 128x128x64/8/4 128x256x64/8/3 128x256x64/8/4"
_TRIED = {1: _FEW, 8: _FEW, 64: f"{_FEW} {_SOME}", 256: f"{_SOME} {_FEW}", 512: f"{_SOME} {_MORE}"}


def tile_of(text: str) -> Tile:
    """ROWSxCHANNELSxDEPTH/WARPS/STAGES, s: swapped."""
    rows, channels, depth, warps, stages = map(int, re.findall(r"\d+", text))
    return Tile(rows, channels, depth, warps, stages, swap=text.endswith("s"))


def random(*shape: int, scale: float = 1.0) -> Tensor:
    """Normal bfloat16 on the GPU."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale


def make_weights(n: int, k: int) -> ExpertWeights:
    """Of all experts, of random values."""
    whole = random(EXPERTS, n, k, scale=0.02)
    return ExpertWeights([LinearWeight(n, k, "bfloat16", each) for each in whole])


def in_turn(calls: list[Callable[[], object]]) -> Callable[[], object]:
    """What runs the next of them."""
    turn = itertools.cycle(calls)
    return lambda: next(turn)()


class Step:
    """Rows and choices of a step of so many tokens, several times."""

    def __init__(self, tokens: int) -> None:
        """Chooses experts at random, as equal routers would."""
        self.copies = 8 if tokens <= 512 else 2
        self.tokens, self.x = tokens, random(tokens, SIZE)
        self.logits = [torch.randn(tokens, EXPERTS, device="cuda") for _ in range(self.copies)]
        self.weights, experts = zip(*(choose_experts(each, RULE) for each in self.logits), strict=True)
        self.experts: tuple[Tensor, ...] = experts
        self.met = sum(len(each.unique()) for each in self.experts) / self.copies

    def limits(self, copy: float, product: float) -> tuple[float, float]:
        """Seconds that the two products need, of gates and ups and of what goes down."""
        pairs, weight = self.tokens * RANKS, self.met * SIZE * INNER * 2
        first = max((2 * weight + 2 * (self.tokens * SIZE + pairs * INNER)) / copy, 4 * pairs * SIZE * INNER / product)
        return first, max((weight + 2 * pairs * (INNER + SIZE)) / copy, 2 * pairs * SIZE * INNER / product)


def check(step: Step, gate_up: ExpertWeights, down: ExpertWeights) -> None:
    """Choices and sums have the reference's bits, a pair those of its token alone and of dense products."""
    weights, experts = choose_experts_reference(step.logits[0], RULE)
    assert torch.equal(weights, step.weights[0]) and torch.equal(experts, step.experts[0].long()), (
        "a choice has its bits"
    )
    results = run_experts(step.x, step.experts[0], gate_up, down, "silu")
    for place in {0, step.tokens // 2, step.tokens - 1}:
        row, chosen = step.x[place : place + 1], step.experts[0][place : place + 1]
        own = results[place]
        assert torch.equal(own, run_experts(row, chosen, gate_up, down, "silu")[0]), "a pair has its bits"
        dense = [
            linear(gated_activation(linear(row, gate_up.weights[expert]), "silu"), down.weights[expert])
            for expert in chosen[0].tolist()
        ]
        assert torch.equal(own, torch.cat(dense)), "a pair has the bits of dense products"
    shared, gate = random(step.tokens, SIZE), torch.randn(step.tokens, 1, device="cuda")
    operands = results, step.weights[0], shared, gate, torch.bfloat16
    assert torch.equal(sum_experts(*operands), sum_experts_reference(*operands)), "a sum has its bits"


def parts(step: Step, gate_up: ExpertWeights, down: ExpertWeights) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, call) of what a layer launches, and of all of it."""
    shared, gate = random(step.tokens, SIZE), torch.randn(step.tokens, 1, device="cuda")
    results = random(step.tokens, RANKS, SIZE)
    yield "choose", in_turn([lambda i=i: choose_experts(step.logits[i], RULE) for i in range(step.copies)])
    yield "group", in_turn([lambda each=each: moe.group_pairs(each, EXPERTS) for each in step.experts])
    yield from products(step, gate_up, down, None)
    yield "sum", lambda: sum_experts(results, step.weights[0], shared, gate, torch.bfloat16)

    def layer(i: int) -> Tensor:
        weights, experts = choose_experts(step.logits[i], RULE)
        results = run_experts(step.x, experts, gate_up, down, "silu")
        return sum_experts(results, weights, shared, gate, torch.bfloat16)

    yield "all", in_turn([lambda i=i: layer(i) for i in range(step.copies)])


def products(
    step: Step, gate_up: ExpertWeights, down: ExpertWeights, tile: Tile | None
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """The two products, with a tile or the table's."""
    groups = [moe.group_pairs(each, EXPERTS, None if tile is None else tile.rows) for each in step.experts]
    inner = random(step.tokens * RANKS, INNER, scale=0.1)
    for name, x, weights, ranks, act in (("gate, up", step.x, gate_up, RANKS, "silu"), ("down", inner, down, 1, "")):

        def call(i: int, x: Tensor = x, weights: ExpertWeights = weights, ranks: int = ranks, act: str = act) -> Tensor:
            return moe.grouped_linear(
                x,
                weights.addresses,
                weights.weights[0].storage,
                groups[i],
                pairs_per_row=ranks,
                activation=act,
                aligned=weights.aligned,
                tile=tile,
            )

        yield name, in_turn([lambda i=i, call=call: call(i) for i in range(step.copies)])


def try_tiles(tokens: int, rounds: int, limits: tuple[float, float]) -> list[dict[str, object]]:
    """Print the times of every tile; all have the first one's bits."""
    gate_up, down, step, records = make_weights(2 * INNER, SIZE), make_weights(SIZE, INNER), Step(tokens), []
    least = dict(zip(("gate, up", "down"), step.limits(*limits), strict=True))
    expected: dict[str, Tensor] = {}
    for text in ["", *_TRIED.get(tokens, _MANY).split()]:
        tile = tile_of(text) if text else None
        torch.manual_seed(1)  # what goes down is the same each time
        for name, call in products(step, gate_up, down, tile):
            try:
                first = call()
            except Exception as error:
                print(f"{tokens:>6} {name:<9} {type(error).__name__:>9} {text}", flush=True)
                continue
            same = torch.equal(first, expected.setdefault(name, first))
            for _ in range(step.copies - 1):
                call()
            time = seconds(call, rounds, step.copies)
            print(
                f"{tokens:>6} {name:<9} {time * 1e6:>9.1f} {least[name] / time:>6.1%} {'' if same else 'OTHER BITS '}"
                f"{text or 'the table'}",
                flush=True,
            )
            records.append({"tokens": tokens, "product": name, "tile": text, "us": time * 1e6, "same": same})
    return records


def run(rounds: int, quick: bool, sweep: int = 0) -> dict[str, object]:
    """Print the table; the JSON record. quick: three sizes only."""
    torch.manual_seed(0)
    copy, product = measure_limits(rounds)
    name = torch.cuda.get_device_name()
    print(f"{name}: copy {copy / 1e12:.3f} TB/s (read + written), product {product / 1e12:.0f} TFLOP/s")
    if sweep:
        return {"benchmark": "experts", "device": name, "results": try_tiles(sweep, rounds, (copy, product))}
    gate_up, down, records = make_weights(2 * INNER, SIZE), make_weights(SIZE, INNER), []
    print("tokens part            us  of limit")
    for tokens in TOKENS[::3] if quick else TOKENS:
        step = Step(tokens)
        check(step, gate_up, down)
        least = step.limits(copy, product)
        needed = {"gate, up": least[0], "down": least[1], "all": sum(least)}
        for part, call in parts(step, gate_up, down):
            time = seconds(call, rounds, step.copies)
            share = f"{needed[part] / time:>8.1%}" if part in needed else ""
            print(f"{tokens:>6} {part:<9} {time * 1e6:>9.1f} {share}", flush=True)
            records.append({"tokens": tokens, "part": part, "us": time * 1e6, "limit_us": needed.get(part, 0.0) * 1e6})
    return {"benchmark": "experts", "device": name, "results": records}
