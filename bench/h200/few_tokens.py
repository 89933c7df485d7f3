"""What a layer takes in steps of 1 to 16 tokens on a GPU, and a head: rows that decode, and rows that verify drafts.

    python bench/h200/few_tokens.py 0.6b 8b [--length 300] [--apart]

Layers with weights of their own follow each other in one CUDA graph: the norm and the products, the rotation, the store
and attention. First bits: every token of steps of several, result and cache, against the same tokens one by one. Then
microseconds a layer, least of 40, beside what the engine ran before: verification by tiles of a KV head's all, few rows
by long weights in one kernel with the norm, a head of few rows by plain tiles; a head and a draw, whose noise was made
when the logits were there. --apart: more numbers of tokens, with each fusion left out. Between them what each kernel
takes, by the profiler, from the end of what began before it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from octavo.bench import gpu_profile
from octavo.ops.attention import rope_decode
from octavo.ops.attention.mask_spec import MaskSpec
from octavo.ops.attention.paged import paged_attention
from octavo.ops.attention.paged_plan import Heads, Plan, Planner, Scratch
from octavo.ops.decoder import DecoderLayerOperands, post_attention, project
from octavo.ops.embedding import gpu as embedding
from octavo.ops.gemm import LinearWeight, cluster_gemm, held_gemm, pack_linear, skinny_gemm, streamed_gemm
from octavo.ops.gemm.fused import normed_logits
from octavo.ops.rope import Rotation, rope_table
from octavo.ops.rope import gpu as rope
from octavo.ops.sampling import gpu as sampling

SHAPES = {"0.6b": (1024, 3072, Heads(16, 8, 128), 28), "8b": (4096, 12288, Heads(32, 8, 128), 8)}
BF16, CUDA, BLOCK = torch.bfloat16, torch.device("cuda"), 64
MASK = MaskSpec(scale=128**-0.5)
_PROFILED, _SHOWN_US = 5, 0.05  # replays; kernels of a layer that take less are not shown


def _layers(hidden: int, inner: int, heads: Heads, count: int, length: int) -> list[DecoderLayerOperands]:
    q, kv, size = heads.num_heads * heads.size, heads.num_kv_heads * heads.size, heads.size
    cos_sin = rope_table(size, length + 32).to(CUDA)

    def weight(n: int, k: int) -> LinearWeight:
        return pack_linear(torch.randn(n, k, dtype=BF16, device=CUDA) * k**-0.5)

    def norm(k: int) -> Tensor:
        return torch.rand(k, device=CUDA) + 0.5

    return [
        DecoderLayerOperands(
            eps=1e-6,
            output=weight(hidden, q),
            output_bias=None,
            attention_norm=None,
            mlp_norm=norm(hidden),
            gate_up=weight(2 * inner, hidden),
            down=weight(hidden, inner),
            activation="silu",
            mlp_out_norm=None,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_size=size,
            input_norm=norm(hidden),
            qkv=weight(q + 2 * kv, hidden),
            keys_values=None,
            qkv_bias=None,
            q_norm=norm(size),
            k_norm=norm(size),
            head_eps=1e-6,
            cos_sin=cos_sin,
            scale=MASK.scale,
        )
        for _ in range(count)
    ]


@dataclasses.dataclass
class Step:
    """Rows of so many queries each, the last ones of `length` tokens."""

    layers: list[DecoderLayerOperands]
    heads: Heads
    rows: int
    queries: int
    length: int
    first_id: int = 0

    def __post_init__(self) -> None:
        """The step's tensors."""
        columns = -(-self.length // BLOCK)
        ints: dict[str, Any] = {"dtype": torch.int32, "device": CUDA}
        table = torch.arange(1, 1 + self.rows * columns, **ints).view(self.rows, columns)
        self.of_rows = (
            torch.arange(self.rows + 1, **ints) * self.queries,
            torch.full((self.rows,), self.length, **ints),
            table,
        )
        position = torch.arange(self.length - self.queries, self.length, device=CUDA).repeat(self.rows, 1)
        self.positions = position.flatten()
        self.slots = (table.long().gather(1, position // BLOCK) * BLOCK + position % BLOCK).flatten()
        shape = (1 + self.rows * columns, self.heads.num_kv_heads, BLOCK, 2 * self.heads.size)
        self.caches = [torch.randn(shape, device=CUDA).to(BF16) for _ in self.layers]
        self.ids = torch.arange(self.rows * self.queries, device=CUDA) + self.first_id
        generator = torch.Generator(CUDA).manual_seed(1)
        self.table = torch.randn(64, self.layers[0].qkv.k, device=CUDA, generator=generator).to(BF16)
        self.planner = Planner(self.heads, MASK, BF16, CUDA, Scratch(CUDA))

    def run(self, change: Callable[[Plan], Plan], *, fused: bool) -> Tensor:
        """The layers' result [tokens, hidden]."""
        tokens = self.rows * self.queries
        plan = self.planner.plan(
            *self.of_rows[:2], num_tokens=tokens, max_query_len=self.queries, max_seq_len=4096, for_capture=True
        )
        plan, scratch = change(plan), self.planner._scratch
        x, residual = embedding.gather_rows(self.ids, self.table, BF16, 1.0), None
        for layer, kv in zip(self.layers, self.caches, strict=True):
            projected, residual = project(layer, x, residual)
            out = projected.new_empty(tokens, self.heads.num_heads, self.heads.size)
            rotation = layer.rotation(self.positions, self.slots)
            given: dict[str, Any] = {"mask_spec": MASK, "plan": plan, "scratch": scratch}
            if fused and rope_decode.serves(self.heads, MASK, plan, kv, rotation):
                rope_decode.fused_rope_decode(projected, rotation, kv, *self.of_rows, out, **given)
            else:
                q = self._rotate(projected, rotation, kv)
                paged_attention(q, kv, *self.of_rows, out, **given)
            x, residual = post_attention(layer, out.flatten(1), residual)
        return x if residual is None else x + residual

    def _rotate(self, projected: Tensor, rotation: Rotation, kv: Tensor) -> Tensor:
        return rope.qk_norm_rope_store(
            projected,
            rotation.positions,
            rotation.cos_sin,
            rotation.q_norm,
            rotation.k_norm,
            rotation.eps,
            self.heads.num_heads,
            self.heads.num_kv_heads,
            self.heads.size,
            kv,
            self.slots,
            1.0,
            None,
            None,
        )

    def captured(self, change: Callable[[Plan], Plan], *, fused: bool = True) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """(a graph of the layers, its result)."""
        self.run(change, fused=fused)
        cluster_gemm.load_for(self.rows * self.queries)
        self.run(change, fused=fused)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = self.run(change, fused=fused)
        return graph, result

    def time(self, change: Callable[[Plan], Plan], *, fused: bool = True) -> tuple[Tensor, float]:
        """(result, microseconds a layer)."""
        graph, result = self.captured(change, fused=fused)
        best = _least(graph)
        return result.clone(), best / len(self.layers)

    def profile(self, change: Callable[[Plan], Plan]) -> None:
        """Print microseconds a layer of each kernel."""
        from torch.profiler import ProfilerActivity, profile

        graph, _ = self.captured(change)
        graph.replay()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(_PROFILED):
                graph.replay()
            torch.cuda.synchronize()
        for row in gpu_profile.kernels(gpu_profile.launches(profiler), _PROFILED * len(self.layers)):
            if row["us"] >= _SHOWN_US:
                print(f"      {row['us']:6.2f} us {row['calls']:5.2f} calls  {row['kernel'][:60]}")

    def alone(self, caches: list[Tensor], token: int) -> Step:
        """The only row's token of that number as a step of its own, over other caches."""
        length = self.length - self.queries + 1 + token
        step = Step(self.layers, self.heads, 1, 1, length, self.first_id + token)
        step.caches = caches
        return step


def _least(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of a replay, the least of 40."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(41)]
    for event in events:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return 1000 * min(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def _same(plan: Plan) -> Plan:
    return plan


@contextlib.contextmanager
def _without(owner: Any, name: str = "serves") -> Iterator[None]:
    with mock.patch.object(owner, name, lambda *args, **options: False):
        yield


@contextlib.contextmanager
def _few_tiles() -> Iterator[None]:
    """Of clustered products those for up to 16 rows alone: others take long to compile."""

    def tiles(kind: Any, n: int, k: int) -> list[Any]:
        tile = cluster_gemm.tile_for(16, n, k, kind.activation is not None)
        return [] if tile is None else [tile]

    with mock.patch.object(cluster_gemm, "_tiles", tiles):
        yield


def _compile_clustered(layers: list[DecoderLayerOperands]) -> None:
    """Side by side, those of `_few_tiles` that layers of long weights run."""
    first = layers[0]
    jobs = [
        (cluster_gemm.tile_for(16, weight.n, weight.k, activation is not None), activation)
        for weight, activation in ((first.qkv, None), (first.output, None), (first.down, None), (first.gate_up, "silu"))
        if weight is not None and weight.k > 3072
    ]
    with ThreadPoolExecutor(8) as pool:
        for tile, activation in dict.fromkeys(jobs):
            assert tile is not None, "the shape has tiles"
            pool.submit(cluster_gemm.compile_tile, tile, cluster_gemm._Kind(BF16, activation))


def _check_bits(layers: list[DecoderLayerOperands], heads: Heads, length: int, queries: int) -> None:
    """Every token of a step, result and cache, against the same tokens one by one."""
    step = Step(layers, heads, 1, queries, length)
    caches = [kv.clone() for kv in step.caches]
    found = step.run(_same, fused=True)
    wrong = [token for token in range(queries) if not _equal(step.alone(caches, token), found[token : token + 1])]
    kept = sum(not torch.equal(ours, theirs) for ours, theirs in zip(step.caches, caches, strict=True))
    verdict = "same" if not wrong and not kept else f"DIFFER: tokens {wrong}, caches of {kept} layers"
    print(f"  bits of {queries} tokens at {length}, each beside a step of it alone: {verdict}", flush=True)


def _equal(step: Step, expected: Tensor) -> bool:
    return torch.equal(step.run(_same, fused=True), expected)


def _time_rows(layers: list[DecoderLayerOperands], heads: Heads, length: int) -> None:
    """Microseconds a layer now, and before, where that differs."""
    print("  us a layer, rows x tokens of each       now    before  bits")
    tiles, skinny = (rope_decode, "verifies_in_columns"), (skinny_gemm, "_clusters")
    for rows, queries, before in ((1, 1, None), (1, 5, tiles), (2, 1, skinny), (4, 1, skinny)):
        step = Step(layers, heads, rows, queries, length)
        found, now = step.time(_same)
        other, least = found, float("nan")
        if before is not None and (before is tiles or layers[0].qkv.k > 3072):
            with _without(*before):
                other, least = step.time(_same)
        verdict = "same" if torch.equal(found, other) else "DIFFER"
        print(f"    {rows:2d} x {queries:2d}                          {now:8.2f}  {least:8.2f}  {verdict}", flush=True)


def _time_apart(layers: list[DecoderLayerOperands], heads: Heads, length: int) -> None:
    """The same with fusions left out."""
    print("  us a layer     now  tiles  products apart  rotation apart  bits")
    for rows, queries in ((1, 2), (1, 5), (1, 8), (1, 9), (1, 16), (2, 1), (4, 1), (8, 1), (16, 1), (4, 5)):
        step = Step(layers, heads, rows, queries, length)
        found, now = step.time(_same)
        plain, apart = step.time(_same, fused=False)
        with _without(held_gemm):
            products, without = step.time(_same)
        with _without(rope_decode, "verifies_in_columns"):
            tiles, by_tiles = step.time(_same)
        names = ("products", "rotation", "tiles")
        results = zip(names, (products, plain, tiles), strict=True)
        unlike = [name for name, y in results if not torch.equal(y, found)]
        times = f"{now:8.2f} {by_tiles:8.2f} {without:8.2f} {apart:8.2f}"
        print(f"    {rows:2d} x {queries:2d}  {times}  {'same' if not unlike else f'DIFFER from {unlike}'}", flush=True)


def _time_head(hidden: int) -> None:
    """A norm and the head of 151,936 tokens."""
    weights = [pack_linear(torch.randn(151936, hidden, dtype=BF16, device=CUDA) * hidden**-0.5) for _ in range(2)]
    norm, table = torch.rand(hidden, device=CUDA) + 0.5, torch.randn(8, hidden, device=CUDA).to(BF16)
    print(f"  us of norm and head of 151,936 x {hidden}      now    before  bits")
    alone = torch.cat([normed_logits(table[row : row + 1], norm, 1e-6, weights[0]) for row in range(8)])
    for rows in (1, 5, 8):
        ids = torch.arange(rows, device=CUDA)

        def run(ids: Tensor = ids) -> Tensor:
            x = embedding.gather_rows(ids, table, BF16, 1.0)
            results = [normed_logits(x, norm, 1e-6, weight) for weight in weights]
            return results[0]

        times, same = [], torch.equal(run(), alone[:rows])
        for change in (contextlib.nullcontext(), _without(streamed_gemm)):
            with change:
                run()
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    result = run()
                times.append(_least(graph) / len(weights))
                same &= torch.equal(result, alone[:rows])
        print(f"    {rows:2d} rows  {times[0]:8.2f}  {times[1]:8.2f}  {'same' if same else 'DIFFER'}", flush=True)


def _time_draw(hidden: int, rows: int = 5) -> None:
    """A norm, that head and a draw, with noise that is there before the logits and with noise made of them."""
    weights = [pack_linear(torch.randn(151936, hidden, dtype=BF16, device=CUDA) * hidden**-0.5) for _ in range(2)]
    norm, table = torch.rand(hidden, device=CUDA) + 0.5, torch.randn(8, hidden, device=CUDA).to(BF16)
    ids = torch.arange(rows, device=CUDA)
    tables = torch.linspace(0, 1, rows, device=CUDA), ids * 7919, ids + 300

    def run(ready: bool) -> Tensor:
        x, drawn = embedding.gather_rows(ids, table, BF16, 1.0), []
        for weight in weights:
            logits = normed_logits(x, norm, 1e-6, weight)
            drawn.append(sampling.draw(logits, ids, *tables, ahead=1, ready=ready)[0])
        return torch.stack(drawn)

    times, tokens = [], []
    for ready in (True, False):
        run(ready)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = run(ready)
        times.append(_least(graph) / len(weights))
        tokens.append(result.clone())
    verdict = "same" if torch.equal(*tokens) else "DIFFER"
    print(f"    {rows:2d} rows drawn {times[0]:7.2f}  {times[1]:8.2f}  {verdict}", flush=True)


def _try(part: Callable[..., None], *args: Any) -> None:
    """A part that fails leaves the others to run."""
    try:
        part(*args)
    except Exception as error:
        print(f"  {part.__name__} FAILED: {error!r:.600}", flush=True)


def _profile(layers: list[DecoderLayerOperands], heads: Heads, length: int, queries: int, *names: str) -> None:
    """Kernels of a step; names: what of `rope_decode` is left out."""
    print(f"    kernels of 1 x {queries}{', before' if names else ''}", flush=True)
    with contextlib.ExitStack() as without:
        for name in names:
            without.enter_context(_without(rope_decode, name))
        Step(layers, heads, 1, queries, length).profile(_same)


def main() -> None:
    """Print tables for each shape."""
    parser = argparse.ArgumentParser()
    parser.add_argument("shapes", nargs="+", choices=SHAPES)
    parser.add_argument("--length", type=int, default=300)
    parser.add_argument("--apart", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    for shape in args.shapes:
        hidden, inner, heads, count = SHAPES[shape]
        began, layers = time.monotonic(), _layers(hidden, inner, heads, count, max(args.length, 1030))
        print(f"{shape}, rows of {args.length} tokens", flush=True)
        _try(_compile_clustered, layers)
        for length in (args.length, 258, 1027):  # the others: across the borders of leaves
            _try(_check_bits, layers, heads, length, 5)
        _try(_time_rows, layers, heads, args.length)
        if args.apart:
            _try(_time_apart, layers, heads, args.length)
        for queries, *names in ((1,), (5,), (5, "verifies_in_columns")):
            _try(_profile, layers, heads, args.length, queries, *names)
        del layers
        _try(_time_head, hidden)
        _try(_time_draw, hidden)
        print(f"  {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    with torch.inference_mode(), _few_tiles():
        main()
