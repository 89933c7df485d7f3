"""Kernel benchmarks: each row prints its distance to a limit that the same run measures.

    python bench/kernel.py cpu-matmul [--threads 2] [--isa x86_64_v3] [--rounds 15] [--quick]
    python bench/kernel.py cpu-attention [--threads 2] [--isa x86_64_v3] [--rounds 15]
    python bench/kernel.py attention [--rounds 15] [--quick] [--flashinfer]
    python bench/kernel.py matmul [--rounds 9] [--quick]
    python bench/kernel.py flex [--rounds 15] [--quick]
    python bench/kernel.py elementwise [--rounds 15] [--quick]
    python bench/kernel.py sampling [--rounds 15] [--quick]
    python bench/kernel.py experts [--rounds 15] [--quick] [--sweep 64]

cpu-matmul: `octavo.ops.gemm.linear` of float32 rows with float32, bfloat16 and int8 weights, and of bfloat16 rows with
bfloat16 weights in pairs (emulated where the processor multiplies none; their limit is its own). Few rows count the
weight's bytes per second against a streaming read of memory; many rows count multiply-adds against those in registers;
tiny shapes stay in cache and count microseconds a call. Weights rotate through more memory than the caches hold, except
for tiny shapes.
Every shape is first checked against the reference implementation. The last line is JSON.

cpu-attention: the native operator beside what torch offers for a paged cache: a gather of each row's blocks followed by
scaled_dot_product_attention, and the reference implementation. Decode counts the bytes of K and V, prefill the
multiply-adds of the visible scores.

attention: the Triton operator on a CUDA device, see `cuda_attention.py`.

matmul: dense products on a CUDA device beside the library's free choice, see `cuda_matmul.py`.

flex: the FlexAttention backend on a CUDA device, see `cuda_flex.py`.

elementwise: norms, rotation with store, activation and embedding on a CUDA device, see `cuda_elementwise.py`.

sampling: drawing, its cuts and log-probabilities on a CUDA device, see `cuda_sampling.py`.

experts: a layer of experts on a CUDA device, see `cuda_experts.py`.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from octavo.ops import native
from octavo.ops.attention import paged_attention, paged_attention_eager
from octavo.ops.attention.mask_spec import MaskSpec
from octavo.ops.gemm import LinearWeight, linear, linear_reference, pack_linear
from octavo.ops.native.limits import best_seconds, measure_limits, measure_pairs

SHAPES = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (32000, 1024))
TINY_SHAPES = ((1536, 256), (256, 768), (512, 256), (4096, 256))
ROWS = (1, 2, 4, 8, 16, 32, 128, 512)
TINY_ROWS = (1, 4, 16, 64)
KINDS = ("float32", "bfloat16", "bfloat16 pairs", "int8")
ROW = (
    "{kind:>14} {n:>6} {k:>5} {m:>4} {us:>10.2f} {gb_s:>7.1f} {gflop_s:>8.1f} "
    "{read_share:>6.0%} {fma_share:>6.0%} {limit_share:>6.0%}"
)
# The sub-commands for a CUDA device: what is measured, rounds, what --quick leaves.
CUDA = {
    "attention": ("attention over the paged cache", 15, "32/8 heads and blocks of 64"),
    "flex": ("the FlexAttention backend", 15, "plain attention and blocks of 64"),
    "elementwise": ("norms, rotation, activation and embedding", 15, "three row counts"),
    "sampling": ("drawing, its cuts and log-probabilities", 15, "three row counts"),
    "matmul": ("dense products", 9, "three row counts"),
    "experts": ("a layer of experts", 15, "three row counts"),
}
# Bytes that the rotating copies of a weight take together: more than the last-level cache's share of these cores.
ROTATION_BYTES = 160 << 20


def make_weights(n: int, k: int, kind: str, total_bytes: int) -> list[LinearWeight]:
    """Distinct packed copies of a random weight (std 0.02) that together take `total_bytes`, at least one."""
    values = torch.randn(n, k) * 0.02
    values = values.bfloat16() if kind.startswith("bfloat16") else values
    native.set_bfloat16_chain("pairs" if kind == "bfloat16 pairs" else "single")
    first = pack_linear(values, "int8" if kind == "int8" else None)
    more = total_bytes // first.num_bytes
    return [first, *(pack_linear(values, "int8" if kind == "int8" else None) for _ in range(more))]


def check(x: Tensor, weight: LinearWeight) -> None:
    """Compare with the reference implementation, relative to the sum of absolute products."""
    difference = (linear(x, weight) - linear_reference(x, weight)).abs().max().item()
    scale = 0.02 * weight.k**0.5
    assert difference < 1e-4 * max(scale, 1.0), f"linear differs from its reference implementation by {difference}"


def measure(
    shapes: tuple[tuple[int, int], ...],
    all_rows: tuple[int, ...],
    rotation: int,
    rounds: int,
    limits: tuple[float, float, float],
) -> Iterator[dict[str, object]]:
    """One record per kind, shape and row count."""
    for kind, (n, k) in itertools.product(KINDS, shapes):
        weights = make_weights(n, k, kind, rotation)
        check(torch.randn(5, k), weights[0])
        check(torch.randn(40, k), weights[0])
        for m in all_rows:
            in_pairs = kind == "bfloat16 pairs"
            products = limits[2] if in_pairs else limits[1]
            dtype = torch.bfloat16 if in_pairs else torch.float32
            x, out = torch.randn(m, k).to(dtype), torch.empty(m, n, dtype=dtype)
            turn = itertools.cycle(weights)
            seconds = best_seconds(lambda: linear(x, next(turn), None, None, out), rounds)  # noqa: B023
            gbytes, gflops = weights[0].num_bytes / seconds / 1e9, 2.0 * m * n * k / seconds / 1e9
            floor = max(weights[0].num_bytes / limits[0] / 1e9, 2.0 * m * n * k / products / 1e9)
            yield {
                "kind": kind,
                "n": n,
                "k": k,
                "m": m,
                "us": round(seconds * 1e6, 2),
                "gb_s": round(gbytes, 1),
                "gflop_s": round(gflops, 1),
                "read_share": round(gbytes / limits[0], 3),
                "fma_share": round(gflops / products, 3),
                "limit_share": round(floor / seconds, 3),
            }


def cpu_matmul(args: argparse.Namespace) -> dict[str, object]:
    """Run the sub-command; prints the table and returns the JSON record."""
    limits = (*measure_limits(args.rounds), measure_pairs(args.rounds))
    print(
        f"{native.isa()}, {native.num_threads()} threads: read {limits[0]:.1f} GB/s, FMA {limits[1]:.1f} GFLOP/s, "
        f"pairs {limits[2]:.1f}"
    )
    print(f"{'kind':>14} {'N':>6} {'K':>5} {'M':>4} {'us':>10} {'GB/s':>7} {'GFLOP/s':>8}   read    fma  limit")
    rows = []
    shapes = SHAPES[:2] if args.quick else SHAPES
    for record in itertools.chain(
        measure(shapes, ROWS, ROTATION_BYTES, args.rounds, limits),
        measure(TINY_SHAPES, TINY_ROWS, 0, args.rounds, limits),
    ):
        rows.append(record)
        print(ROW.format(**record), flush=True)
    return {
        "bench": "cpu-matmul",
        "isa": native.isa(),
        "threads": native.num_threads(),
        "read_gb_s": round(limits[0], 1),
        "fma_gflop_s": round(limits[1], 1),
        "pairs_gflop_s": round(limits[2], 1),
        "rows": rows,
    }


# name, rows, cached tokens of a row, queries of a row, heads, KV heads, head size
ATTENTION = (
    ("decode", 1, 4096, 1, 16, 8, 128),
    ("decode", 1, 32768, 1, 16, 8, 128),
    ("decode", 32, 192, 1, 16, 8, 128),
    ("decode", 32, 192, 1, 4, 2, 64),
    ("prefill", 1, 0, 512, 16, 8, 128),
    ("prefill", 4, 0, 128, 16, 8, 128),
    ("prefill", 1, 1536, 512, 16, 8, 128),
)


def gathered_sdpa(
    q: Tensor, kv: Tensor, query_start: Tensor, seq_lens: Tensor, table: Tensor, out: Tensor, *, mask_spec: MaskSpec
) -> None:
    """What torch alone would do: copy each row's K and V together, then its attention with a mask."""
    block = kv.shape[2]
    for row, length in enumerate(seq_lens.tolist()):
        start, end = int(query_start[row]), int(query_start[row + 1])
        blocks = kv[table[row, : -(-length // block)].long()]
        both = blocks.permute(1, 0, 2, 3).reshape(kv.shape[1], -1, kv.shape[3])[:, :length]
        k, v = both.chunk(2, dim=-1)
        mask = torch.arange(length) <= torch.arange(length - (end - start), length)[:, None]
        heads = functional.scaled_dot_product_attention(
            q[start:end].transpose(0, 1)[None], k[None], v[None], mask, scale=mask_spec.scale, enable_gqa=True
        )
        out[start:end] = heads[0].transpose(0, 1)


def cpu_attention(args: argparse.Namespace) -> dict[str, object]:
    """Run the sub-command; prints the table and returns the JSON record."""
    limits = measure_limits(args.rounds)
    print(f"{native.isa()}, {native.num_threads()} threads: read {limits[0]:.1f} GB/s, FMA {limits[1]:.1f} GFLOP/s")
    print(f"{'case':>8} {'rows':>4} {'cached':>6} {'new':>4} {'heads':>8}  native us  share  gather+sdpa us  eager us")
    records = []
    for name, rows, cached, new, heads, kv_heads, size in ATTENTION:
        length, block = cached + new if name == "prefill" else cached, 16
        width = -(-length // block)
        kv = torch.randn(rows * width + 1, kv_heads, block, 2 * size)
        table = (torch.randperm(rows * width) + 1).view(rows, width).int()
        q, query_start = torch.randn(rows * new, heads, size), (torch.arange(rows + 1) * new).int()
        call = (q, kv, query_start, torch.full((rows,), length).int(), table)
        out, expected = torch.empty_like(q), torch.empty_like(q)
        seconds = {}
        for operator in (paged_attention, gathered_sdpa, paged_attention_eager):
            run: Callable[..., None] = operator
            best = best_seconds(lambda: run(*call, out, mask_spec=MaskSpec(size**-0.5)), args.rounds)  # noqa: B023
            seconds[operator.__name__] = best
            paged_attention_eager(*call, expected, mask_spec=MaskSpec(size**-0.5))
            assert (out - expected).abs().max() < 1e-4, f"{operator.__name__} differs from the reference implementation"
        visible = rows * sum(range(length - new + 1, length + 1))
        floor = max(rows * length * kv_heads * 2 * size * 4 / limits[0], 4.0 * visible * heads * size / limits[1]) / 1e9
        native_s, sdpa_s, eager_s = seconds.values()
        share = floor / native_s
        print(
            f"{name:>8} {rows:>4} {cached:>6} {new:>4} {heads:>3}/{kv_heads}/{size:<3} {native_s * 1e6:>9.1f} "
            f"{share:>6.0%} {sdpa_s * 1e6:>15.1f} {eager_s * 1e6:>9.1f}",
            flush=True,
        )
        records.append(
            {
                "case": name,
                "rows": rows,
                "cached": cached,
                "new": new,
                "heads": heads,
                "us": native_s * 1e6,
                "limit_share": share,
                "sdpa_us": sdpa_s * 1e6,
                "eager_us": eager_s * 1e6,
            }
        )
    return {"bench": "cpu-attention", "isa": native.isa(), "threads": native.num_threads(), "rows": records}


def cuda(args: argparse.Namespace) -> dict[str, object]:
    """Run the sub-command's module, cuda_*.py beside this file; prints its tables and returns the JSON record."""
    bench = importlib.import_module(f"cuda_{args.command}")  # most need triton
    more = {name: getattr(args, name) for name in ("flashinfer", "sweep") if hasattr(args, name)}
    return bench.run(args.rounds, args.quick, **more)


def main() -> None:
    """Parse the command line and run one benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    matmul = commands.add_parser("cpu-matmul", help="dense products on the CPU")
    matmul.add_argument("--quick", action="store_true", help="two large shapes only")
    attention = commands.add_parser("cpu-attention", help="attention over the paged cache on the CPU")
    for command, function in ((matmul, cpu_matmul), (attention, cpu_attention)):
        command.add_argument("--threads", type=int, default=0, help="default: torch's")
        command.add_argument("--isa", default="", help="a built instruction set, see octavo.ops.native.built_isas()")
        command.add_argument("--rounds", type=int, default=15)
        command.set_defaults(function=function)
    for name, (what, rounds, quick) in CUDA.items():
        command = commands.add_parser(name, help=f"{what} on a CUDA device")
        command.add_argument("--rounds", type=int, default=rounds)
        command.add_argument("--quick", action="store_true", help=f"{quick} only")
        if name == "attention":
            command.add_argument("--flashinfer", action="store_true", help="FlashInfer beside; compiles for minutes")
        if name == "experts":
            command.add_argument("--sweep", type=int, default=0, metavar="TOKENS", help="try tiles for such steps")
        command.set_defaults(function=cuda)
    args = parser.parse_args()
    if not args.command.startswith("cpu-"):
        if not torch.cuda.is_available():
            parser.exit(1, "no CUDA device\n")
        print(json.dumps(args.function(args)))
        return
    if not native.available():
        parser.exit(1, "no native library: build it with `python setup.py build_ext --inplace`\n")
    with native.using(args.isa or native.isa()):
        if args.threads:
            native.set_num_threads(args.threads)
            torch.set_num_threads(args.threads)
        print(json.dumps(args.function(args)))


if __name__ == "__main__":
    main()
