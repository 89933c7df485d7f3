"""What a layer takes in steps of 1 to 16 tokens on a GPU: rows that decode, and one row that verifies drafts.

    python bench/h200/few_tokens.py 0.6b [8b] [--length 300] [--sweep]

Layers with weights of their own follow each other in one CUDA graph: the norm and the products, the rotation, the store
and attention. Beside what the engine runs ("now") stand the same steps with each fusion left out; bits are compared.
--sweep: tiles of the kernel that rotates and attends. Microseconds a layer, least of 40.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from octavo.ops.attention import rope_decode
from octavo.ops.attention.mask_spec import MaskSpec
from octavo.ops.attention.paged import paged_attention
from octavo.ops.attention.paged_plan import Heads, Plan, Planner, Scratch
from octavo.ops.decoder import DecoderLayerOperands, post_attention, project
from octavo.ops.embedding import gpu as embedding
from octavo.ops.gemm import LinearWeight, cluster_gemm, held_gemm, pack_linear
from octavo.ops.rope import Rotation, rope_table
from octavo.ops.rope import gpu as rope

SHAPES = {"0.6b": (1024, 3072, Heads(16, 8, 128), 28), "8b": (4096, 12288, Heads(32, 8, 128), 8)}
BF16, CUDA, BLOCK = torch.bfloat16, torch.device("cuda"), 64
MASK = MaskSpec(scale=128**-0.5)


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
        self.ids = torch.arange(self.rows * self.queries, device=CUDA)
        self.table = torch.randn(64, self.layers[0].qkv.k, device=CUDA).to(BF16)
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

    def time(self, change: Callable[[Plan], Plan], *, fused: bool = True) -> tuple[Tensor, float]:
        """(result, microseconds a layer)."""
        self.run(change, fused=fused)
        cluster_gemm.load_for(self.rows * self.queries)
        torch.cuda.synchronize()
        graph, events = torch.cuda.CUDAGraph(), [torch.cuda.Event(enable_timing=True) for _ in range(41)]
        with torch.cuda.graph(graph):
            result = self.run(change, fused=fused)
        for event in events:
            graph.replay()
            event.record()
        torch.cuda.synchronize()
        best = min(a.elapsed_time(b) for a, b in itertools.pairwise(events))
        return result.clone(), 1000 * best / len(self.layers)


def _same(plan: Plan) -> Plan:
    return plan


def _tiled(stages: int, warps: int) -> Callable[[Plan], Plan]:
    def change(plan: Plan) -> Plan:
        assert plan.rows is not None, "rows are short"
        tile = dataclasses.replace(plan.rows.tile, stages=stages, warps=warps)
        return dataclasses.replace(plan, rows=dataclasses.replace(plan.rows, tile=tile))

    return change


@contextlib.contextmanager
def _without(kernel: Any) -> Iterator[None]:
    with mock.patch.object(kernel, "serves", lambda *args, **options: False):
        yield


def main() -> None:
    """Print a table for each shape."""
    parser = argparse.ArgumentParser()
    parser.add_argument("shapes", nargs="+", choices=SHAPES)
    parser.add_argument("--length", type=int, default=300)
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    for shape in args.shapes:
        hidden, inner, heads, count = SHAPES[shape]
        layers = _layers(hidden, inner, heads, count, args.length)
        print(f"{shape}, rows of {args.length} tokens: us a layer  now  products apart  rotation apart  bits")
        for rows, queries in ((1, 1), (1, 2), (1, 5), (1, 8), (1, 9), (1, 16), (2, 1), (4, 1), (8, 1), (16, 1), (4, 5)):
            step = Step(layers, heads, rows, queries, args.length)
            found, now = step.time(_same)
            plain, apart = step.time(_same, fused=False)
            with _without(held_gemm):
                products, without = step.time(_same)
            names = ("products", "rotation")
            unlike = [name for name, y in zip(names, (products, plain), strict=True) if not torch.equal(y, found)]
            times = f"{now:8.2f} {without:8.2f} {apart:8.2f}"
            print(f"  {rows:2d} x {queries:2d}  {times}  {'same' if not unlike else f'DIFFER from {unlike}'}")
            if args.sweep and rows == 1 and queries == 5:
                for stages, warps in ((2, 4), (3, 4), (4, 4), (4, 8), (2, 8)):
                    with contextlib.suppress(Exception):
                        print(f"    stages {stages} warps {warps}: {step.time(_tiled(stages, warps))[1]:8.2f}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
