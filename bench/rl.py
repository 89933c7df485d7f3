"""Benchmark of a trainer's step on a GPU, beside plain torch's: `python bench/rl.py [0.6b] [8b] [--parts] [--tiles]`.

The model is transformers' Qwen3 with random weights, converted; torch's is the same mathematics over the same
parameters by its library's products, its fused norms and flash attention of packed rows, with the head in blocks that
are computed again in backward, as ours is. Times are medians by events; memory is the peak of a whole step; a forward
of few tokens is timed by the clock, and is the host's part of any forward of a small model. A limit counts operations
and bytes that both must pay: products and attention at RATE, elementwise operators at BANDWIDTH.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from octavo import rl
from octavo.attention.base import mask_spec_of
from octavo.bench.shapes import SHAPES
from octavo.cache.specs import AttentionSpec
from octavo.ops.backward import activation, norm, rope
from octavo.ops.backward.attention import Tile, Tiles, attention_backward, tiles_for
from octavo.rl.autograd.linear import backward_input, backward_weight
from octavo.rl.autograd.outside import num_processors
from trainer_model import make_model

RATE, BANDWIDTH = 780e12, 4.2e12  # of an H200: bfloat16 products per second, bytes read and written
TOKENS = {"0.6b": 16384, "8b": 8192}
HEAD_ROWS = 2048  # of torch's head at a time
FEW = [200, 201, 202]  # tokens of sequences whose forward takes the GPU less time than the host
BF16 = torch.bfloat16


def lengths_of(num_tokens: int) -> list[int]:
    """Sequences of 200 to 2,000 tokens."""
    draw, found = random.Random(0), list[int]()
    while sum(found) < num_tokens:
        found.append(min(draw.randrange(200, 2000), num_tokens - sum(found)))
    return found


class Plain:
    """torch's step over a model's parameters."""

    def __init__(self, model: Any, pack: rl.Pack) -> None:
        """`pack`: what it will be asked for."""
        self.model, self.config, self.pack = model, model.config, pack
        self.start, self.longest = pack.inputs.query_start, max(pack.lengths)
        size = self.config.head_dim
        rope = getattr(self.config, "rope_parameters", None) or {}
        theta = rope.get("rope_theta") or getattr(self.config, "rope_theta", 1e6)
        angles = pack.positions[:, None] / theta ** (torch.arange(0, size, 2, device="cuda") / size)
        self.cos, self.sin = (torch.cat((part, part), 1)[:, None].to(BF16) for part in (angles.cos(), angles.sin()))

    def turned(self, x: Tensor) -> Tensor:
        """Rotated heads."""
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-second, first), dim=-1) * self.sin

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Flash attention of packed rows."""
        found: Tensor = torch.ops.aten._flash_attention_forward(
            q, k, v, self.start, self.start, self.longest, self.longest, 0.0, True, False, scale=q.shape[2] ** -0.5
        )[0]
        return found

    def norm(self, x: Tensor, module: Any) -> Tensor:
        """The library's."""
        return functional.rms_norm(x, module.weight.shape, module.weight, self.config.rms_norm_eps)

    def layer(self, x: Tensor, layer: Any) -> Tensor:
        """One decoder layer."""
        own, size = layer.self_attn, self.config.head_dim
        y = self.norm(x, layer.input_layernorm)
        projections = (own.q_proj, own.k_proj, own.v_proj)
        q, k, v = (functional.linear(y, part.weight).unflatten(1, (-1, size)) for part in projections)
        q, k = self.turned(self.norm(q, own.q_norm)), self.turned(self.norm(k, own.k_norm))
        x = x + functional.linear(self.attend(q, k, v).flatten(1), own.o_proj.weight)
        y, mlp = self.norm(x, layer.post_attention_layernorm), layer.mlp
        inner = functional.silu(functional.linear(y, mlp.gate_proj.weight)) * functional.linear(y, mlp.up_proj.weight)
        return x + functional.linear(inner, mlp.down_proj.weight)

    def head(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Log-probabilities of ids, a block of rows at a time."""

        def block(rows: Tensor, own: Tensor) -> Tensor:
            logits = functional.linear(rows, self.model.lm_head.weight).float()
            return logits.log_softmax(-1).gather(1, own[:, None])[:, 0]

        parts = zip(hidden.split(HEAD_ROWS), ids.split(HEAD_ROWS), strict=True)
        return torch.cat([checkpoint(block, rows, own, use_reentrant=False) for rows, own in parts])

    def __call__(self) -> Tensor:
        """The sum of all log-probabilities."""
        trunk = self.model.model
        assert self.pack.ids is not None, "a pack with ids"
        x = functional.embedding(self.pack.ids, trunk.embed_tokens.weight)
        for layer in trunk.layers:
            x = self.layer(x, layer)
        targets = self.pack.next_tokens()
        asked = (targets != rl.NO_TOKEN).nonzero().flatten()
        return self.head(self.norm(x, trunk.norm)[asked], targets[asked]).sum()


def timed(step: Callable[[], Tensor], model: Any, rounds: int) -> tuple[float, float, float]:
    """(forward, backward) in ms, medians, and the peak of memory in GiB."""
    times = []
    for turn in range(rounds + 2):
        model.zero_grad(set_to_none=True)
        if turn == 1:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        torch.cuda.synchronize()
        marks[0].record()
        loss = step()
        marks[1].record()
        loss.backward()
        marks[2].record()
        torch.cuda.synchronize()
        del loss
        if turn > 1:
            times.append((marks[0].elapsed_time(marks[1]), marks[1].elapsed_time(marks[2])))
    forward, backward = (sorted(each)[len(times) // 2] for each in zip(*times, strict=True))
    return forward, backward, torch.cuda.max_memory_allocated() / 2**30


def of_few(step: Callable[[], Tensor], rounds: int) -> float:
    """A forward in ms by the clock, the median."""
    times = []
    for _ in range(4 * rounds + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return sorted(times[2:])[2 * rounds]


def limits(name: str, lengths: list[int]) -> tuple[float, float]:
    """(forward, backward) in ms."""
    shape = SHAPES[name]
    hidden, inner, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    heads, kv_heads, size = shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"]
    tokens, width = sum(lengths), (heads + 2 * kv_heads) * size
    of_layer = hidden * (width + heads * size) + 3 * hidden * inner
    products = 2 * tokens * (layers * of_layer + hidden * shape["vocab_size"])
    pairs = layers * sum(2 * length * length * heads * size for length in lengths)  # two products of half of the pairs
    elementwise = layers * tokens * 2 * (4 * hidden + 2 * 3 * hidden + 2 * width + 3 * inner)
    logits = tokens * shape["vocab_size"] * 4
    forward = (products + pairs) / RATE + (elementwise + logits) / BANDWIDTH
    again = 2 * tokens * hidden * shape["vocab_size"]
    backward = (2 * products + again + 2.5 * pairs) / RATE + (1.7 * elementwise + 2.5 * logits) / BANDWIDTH
    return 1e3 * forward, 1e3 * backward


def record(name: str, part: str, ours: float, theirs: float, limit: float) -> dict[str, Any]:
    """One line, times in ms."""
    speed = theirs / ours if ours else 0.0
    return {"model": name, "part": part, "ms": ours, "torch_ms": theirs, "speed": speed, "limit_ms": limit}


def whole(name: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Both steps of one model."""
    model = make_model(name)
    lengths = lengths_of(TOKENS[name])
    draw = random.Random(1)
    pack, few = (
        rl.Pack.of([[draw.randrange(SHAPES[name]["vocab_size"]) for _ in range(n)] for n in counts], device="cuda")
        for counts in (lengths, FEW)
    )
    theirs, few_theirs = timed(Plain(model, pack), model, rounds), of_few(Plain(model, few), rounds)
    watched = ["model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"]
    before = {key: parameter.grad.clone() for key, parameter in model.named_parameters() if key in watched}
    rl.convert(model)
    ours = timed(lambda: rl.logprobs(model, pack).logprobs.sum(), model, rounds)
    few_ours = of_few(lambda: rl.logprobs(model, few).logprobs.sum(), rounds)
    found = {key: parameter.grad for key, parameter in model.named_parameters() if key in watched}
    far = max(float((found[key].float() - own.float()).norm() / own.float().norm()) for key, own in before.items())
    for index, part in enumerate(("forward", "backward")):
        yield record(name, part, ours[index], theirs[index], limits(name, lengths)[index])
    yield record(name, f"forward of few, {sum(FEW)} tokens", few_ours, few_theirs, 0.0)
    yield record(name, "peak GiB", ours[2], theirs[2], far)


def _median(call: Callable[[], object]) -> float:
    import triton

    return float(triton.testing.do_bench(call, warmup=10, rep=40, return_mode="median"))


def _of_torch(make: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], object]:
    """torch's way back through what `make` makes."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = make(*leaves)
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def drawn(*sizes: int) -> Tensor:
    """Normal bfloat16."""
    return torch.randn(*sizes, device="cuda", dtype=BF16)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a model and its tokens."""

    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    size: int
    vocab: int
    tokens: int

    @classmethod
    def of(cls, name: str) -> Sizes:
        """By the model's name."""
        fields = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        return cls(name, *(SHAPES[name][key] for key in (*fields, "vocab_size")), TOKENS[name])

    def record(self, part: str, ours: float, theirs: float, seconds: float) -> dict[str, Any]:
        """One line; seconds: the limit."""
        return record(self.name, part, ours, theirs, 1e3 * seconds)


def parts(name: str) -> Iterator[dict[str, Any]]:
    """Operators of one layer, and the head."""
    sizes = Sizes.of(name)
    for each in (elementwise_parts, attention_parts, product_parts, head_parts):
        yield from each(sizes)
        torch.cuda.empty_cache()


def elementwise_parts(of: Sizes) -> Iterator[dict[str, Any]]:
    """The way back through a norm and through gates."""
    many = num_processors(torch.device("cuda"))
    x, grad, weight = drawn(of.tokens, of.hidden), drawn(of.tokens, of.hidden), drawn(of.hidden)
    wide = weight.float()
    ours = _median(lambda: norm.norm_backward(grad, x, wide, 1e-6, many))
    theirs = _median(_of_torch(lambda x, w: functional.rms_norm(x, (of.hidden,), w, 1e-6), x, weight))
    yield of.record("norm, back", ours, theirs, 6 * x.numel() / BANDWIDTH)
    gate_up, own = drawn(of.tokens, 2 * of.inner), drawn(of.tokens, of.inner)
    halves = [half.contiguous() for half in gate_up.chunk(2, dim=1)]
    ours = _median(lambda: activation.gated_backward(own, gate_up, tanh=False))
    theirs = _median(_of_torch(lambda g, u: functional.silu(g) * u, *halves))
    yield of.record("gates, back", ours, theirs, 10 * own.numel() / BANDWIDTH)


def attention_parts(of: Sizes) -> Iterator[dict[str, Any]]:
    """The way back through rotation, and attention in both directions."""
    many, size, lengths = num_processors(torch.device("cuda")), of.size, lengths_of(of.tokens)
    pack = rl.Pack(lengths, device="cuda")
    spec = AttentionSpec(num_heads=of.heads, num_kv_heads=of.kv_heads, head_size=size, scale=size**-0.5)
    qkv, q, own = drawn(of.tokens, (of.heads + 2 * of.kv_heads) * size), *drawn(2, of.tokens, of.heads, size)
    states = pack.new_states(of.kv_heads, 2 * size, BF16)
    states[pack.slots] = drawn(of.tokens, of.kv_heads, 2 * size)
    table, ones = torch.rand(max(lengths), size, device="cuda"), torch.ones(size, device="cuda")
    plain = Plain.__new__(Plain)
    plain.start, plain.longest = pack.inputs.query_start, max(lengths)
    plain.cos = plain.sin = drawn(of.tokens, 1, size)
    k, v = (part.contiguous() for part in states[pack.slots].split(size, dim=2))

    def turn(x: Tensor, weight: Tensor) -> Tensor:
        return plain.turned(functional.rms_norm(x, (size,), weight, 1e-6))

    back = [_of_torch(turn, x, ones.to(BF16)) for x in (q, k)]
    ours = _median(
        lambda: rope.rope_backward(own, states, qkv, pack.positions, pack.slots, table, ones, ones, 1e-6, many)
    )
    yield of.record("rotation, back", ours, _median(lambda: [each() for each in back]), 6 * qkv.numel() / BANDWIDTH)
    pairs = sum(2 * length * length * of.heads * size for length in lengths) / RATE
    with torch.no_grad():
        theirs = _median(lambda: plain.attend(q, k, v))
    yield of.record("attention", _median(lambda: pack.attend(q, states, spec)), theirs, pairs)
    out, facts = pack.attend(q, states, spec), mask_spec_of(spec)
    ours = _median(lambda: attention_backward(q, states, own, out, pack.rows, facts))
    yield of.record("attention, back", ours, _median(_of_torch(plain.attend, q, k, v)), 2.5 * pairs)


def product_parts(of: Sizes) -> Iterator[dict[str, Any]]:
    """A product, and the two of its way back."""
    for name, width in (("up", of.inner), ("k", of.kv_heads * of.size)):
        x, matrix, grad = drawn(of.tokens, of.hidden), drawn(width, of.hidden), drawn(of.tokens, width)
        flops = 2 * of.tokens * width * of.hidden / RATE
        with torch.no_grad():
            ours, theirs = _median(lambda: rl.linear(x, matrix)), _median(lambda: functional.linear(x, matrix))  # noqa: B023
        yield of.record(f"product {name}", ours, theirs, flops)
        ours = _median(lambda: (backward_input(grad, matrix, x), backward_weight(grad, x, matrix)))  # noqa: B023
        yield of.record(f"product {name}, back", ours, _median(_of_torch(functional.linear, x, matrix)), 2 * flops)


def head_parts(of: Sizes) -> Iterator[dict[str, Any]]:
    """Log-probabilities in both directions."""
    count = 4096
    matrix, rows = drawn(of.vocab, of.hidden) * 0.02, drawn(count, of.hidden)
    ids = torch.randint(0, of.vocab, (count,), device="cuda")
    plain = Plain.__new__(Plain)

    def ours_of(rows: Tensor, matrix: Tensor) -> Tensor:
        return rl.head_logprob(rows, matrix, ids).logprobs

    def theirs_of(rows: Tensor, matrix: Tensor) -> Tensor:
        plain.model = types.SimpleNamespace(lm_head=types.SimpleNamespace(weight=matrix))
        return plain.head(rows, ids)

    flops, logits = 2 * count * of.hidden * of.vocab / RATE, count * of.vocab * 4 / BANDWIDTH
    with torch.no_grad():
        ours, theirs = _median(lambda: ours_of(rows, matrix)), _median(lambda: theirs_of(rows, matrix))
    yield of.record(f"head, {count} rows", ours, theirs, flops + logits)
    yield of.record(
        "head, back", _step(ours_of, rows, matrix), _step(theirs_of, rows, matrix), 3 * flops + 2.5 * logits
    )


def _step(make: Callable[..., Tensor], *inputs: Tensor) -> float:
    """The way back alone, of a graph that is made anew each time."""
    leaves, times = [tensor.detach().requires_grad_() for tensor in inputs], []
    for _ in range(6):
        out = make(*leaves).sum()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        torch.autograd.grad(out, leaves)
        marks[1].record()
        torch.cuda.synchronize()
        times.append(marks[0].elapsed_time(marks[1]))
    return sorted(times[1:])[2]


def tiles() -> Iterator[dict[str, Any]]:
    """Attention's way back at 8b by other tiles than the table's: one of the two kernels at a time."""
    heads, kv_heads, size = 32, 8, 128
    lengths = lengths_of(TOKENS["8b"])
    pack = rl.Pack(lengths, device="cuda")
    spec = AttentionSpec(num_heads=heads, num_kv_heads=kv_heads, head_size=size, scale=size**-0.5)
    q, own = (torch.randn(sum(lengths), heads, size, device="cuda", dtype=BF16) for _ in range(2))
    states = torch.randn(pack.num_slots, kv_heads, 2 * size, device="cuda", dtype=BF16)
    out, facts, usual = pack.attend(q, states, spec), mask_spec_of(spec), tiles_for(size, BF16)
    of_queries = [(128, 64, 8, 3), (64, 128, 4, 2), (64, 64, 4, 2), (64, 64, 4, 3), (128, 128, 8, 2), (64, 32, 4, 3)]
    of_keys = [(64, 128, 8, 3), (64, 64, 4, 2), (32, 128, 8, 3), (64, 64, 4, 1), (32, 64, 4, 2), (128, 64, 8, 2)]
    chosen = [("both, as the table says", usual)]
    chosen += [(f"queries {facts_}", Tiles(Tile(*facts_), usual.of_keys)) for facts_ in of_queries]
    chosen += [(f"keys {facts_}", Tiles(usual.of_queries, Tile(*facts_))) for facts_ in of_keys]
    for part, each in chosen:
        try:
            ms = _median(lambda: attention_backward(q, states, own, out, pack.rows, facts, tiles=each))  # noqa: B023
        except Exception as error:  # a tile that does not fit
            part, ms = f"{part}: {type(error).__name__}", float("nan")
        yield record("8b", part, ms, 0.0, 0.0)


def main() -> None:
    """Print a table; `--json` writes all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(TOKENS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", action="store_true", help="operators as well")
    parser.add_argument("--tiles", action="store_true", help="other tiles of attention's way back")
    parser.add_argument("--json", help="a file")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}; ms; the limit of a peak, in GiB, is the gradients' distance from torch's")
    print(f"{'model':<6} {'part':<34} {'ours':>9} {'torch':>9} {'speed':>6} {'limit':>8}", flush=True)
    records = []
    for each in _all_of(options):
        records.append(each)
        numbers = f"{each['ms']:>9.3f} {each['torch_ms']:>9.3f} {each['speed']:>6.2f} {each['limit_ms']:>8.3f}"
        print(f"{each['model']:<6} {each['part']:<34} {numbers}", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(records), encoding="utf-8")


def _all_of(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name in options.models:
        yield from whole(name, options.rounds)
        torch.cuda.empty_cache()
        yield from parts(name) if options.parts else ()
    yield from tiles() if options.tiles else ()


if __name__ == "__main__":
    main()
