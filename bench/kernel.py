"""Kernel benchmarks: each row prints its distance to a limit that the same run measures.

    python bench/kernel.py cpu-matmul [--threads 2] [--isa x86_64_v3] [--rounds 15] [--quick]

cpu-matmul: `octavo.ops.matmul.linear` for float32, bfloat16 and int8 weights. Few rows count the weight's bytes per
second against a streaming read of memory; many rows count multiply-adds against FMAs in registers; tiny shapes stay in
cache and count microseconds a call. Weights rotate through more memory than the caches hold, except for tiny shapes.
Every shape is first checked against the eager twin. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from octavo.ops import native
from octavo.ops.matmul import LinearWeight, linear, linear_reference, pack_linear

SHAPES = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (32000, 1024))
TINY_SHAPES = ((1536, 256), (256, 768), (512, 256), (4096, 256))
ROWS = (1, 2, 4, 8, 16, 32, 128, 512)
TINY_ROWS = (1, 4, 16, 64)
KINDS = ("float32", "bfloat16", "int8")
ROW = (
    "{kind:>9} {n:>6} {k:>5} {m:>4} {us:>10.2f} {gb_s:>7.1f} {gflop_s:>8.1f} "
    "{read_share:>6.0%} {fma_share:>6.0%} {limit_share:>6.0%}"
)
# Bytes that the rotating copies of a weight take together: more than the last-level cache's share of these cores.
ROTATION_BYTES = 160 << 20


def best_seconds(call: Callable[[], object], rounds: int, round_seconds: float = 0.02) -> float:
    """Time of one call: the best of `rounds` averages, as the limits are the best of theirs (the cores are shared)."""
    call()
    start = time.perf_counter()
    call()
    repeats = max(1, int(round_seconds / max(time.perf_counter() - start, 1e-7)))
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        times.append((time.perf_counter() - start) / repeats)
    return min(times)


def measure_limits(rounds: int) -> tuple[float, float]:
    """(read bandwidth in GB/s, FMA rate in GFLOP/s) of the threads in use, best of the rounds."""
    lib = native.lib()
    count = 128 << 20
    data = torch.zeros(count)
    lib.octavo_advise_huge(data.data_ptr(), count * 4)
    read = best_seconds(lambda: lib.octavo_probe_read(data.data_ptr(), count), rounds)
    work = lib.octavo_probe_fma(100_000)
    fma = best_seconds(lambda: lib.octavo_probe_fma(100_000), 5 * rounds, 0.005)
    return count * 4 / read / 1e9, work * 2 / fma / 1e9


def make_weights(n: int, k: int, kind: str, total_bytes: int) -> list[LinearWeight]:
    """Distinct packed copies of a random weight (std 0.02) that together take `total_bytes`, at least one."""
    values = torch.randn(n, k) * 0.02
    values = values.bfloat16() if kind == "bfloat16" else values
    first = pack_linear(values, "int8" if kind == "int8" else None)
    more = total_bytes // first.num_bytes
    return [first, *(pack_linear(values, "int8" if kind == "int8" else None) for _ in range(more))]


def check(x: Tensor, weight: LinearWeight) -> None:
    """Compare with the eager twin, relative to the sum of absolute products."""
    difference = (linear(x, weight) - linear_reference(x, weight)).abs().max().item()
    scale = 0.02 * weight.k**0.5
    assert difference < 1e-4 * max(scale, 1.0), f"linear differs from its twin by {difference}"


def measure(
    shapes: tuple[tuple[int, int], ...],
    all_rows: tuple[int, ...],
    rotation: int,
    rounds: int,
    limits: tuple[float, float],
) -> Iterator[dict[str, object]]:
    """One record per kind, shape and row count."""
    for kind, (n, k) in itertools.product(KINDS, shapes):
        weights = make_weights(n, k, kind, rotation)
        check(torch.randn(5, k), weights[0])
        check(torch.randn(40, k), weights[0])
        for m in all_rows:
            x, out = torch.randn(m, k), torch.empty(m, n)
            turn = itertools.cycle(weights)
            seconds = best_seconds(lambda: linear(x, next(turn), None, None, out), rounds)  # noqa: B023
            gbytes, gflops = weights[0].num_bytes / seconds / 1e9, 2.0 * m * n * k / seconds / 1e9
            floor = max(weights[0].num_bytes / limits[0] / 1e9, 2.0 * m * n * k / limits[1] / 1e9)
            yield {
                "kind": kind, "n": n, "k": k, "m": m, "us": round(seconds * 1e6, 2), "gb_s": round(gbytes, 1),
                "gflop_s": round(gflops, 1), "read_share": round(gbytes / limits[0], 3),
                "fma_share": round(gflops / limits[1], 3), "limit_share": round(floor / seconds, 3),
            }  # fmt: skip


def cpu_matmul(args: argparse.Namespace) -> dict[str, object]:
    """Run the sub-command; prints the table and returns the JSON record."""
    if args.threads:
        native.set_num_threads(args.threads)
        torch.set_num_threads(args.threads)
    limits = measure_limits(args.rounds)
    print(f"{native.isa()}, {native.num_threads()} threads: read {limits[0]:.1f} GB/s, FMA {limits[1]:.1f} GFLOP/s")
    print(f"{'kind':>9} {'N':>6} {'K':>5} {'M':>4} {'us':>10} {'GB/s':>7} {'GFLOP/s':>8}   read    fma  limit")
    rows = []
    shapes = SHAPES[:2] if args.quick else SHAPES
    for record in itertools.chain(
        measure(shapes, ROWS, ROTATION_BYTES, args.rounds, limits),
        measure(TINY_SHAPES, TINY_ROWS, 0, args.rounds, limits),
    ):
        rows.append(record)
        print(ROW.format(**record), flush=True)
    return {"bench": "cpu-matmul", "isa": native.isa(), "threads": native.num_threads(),
            "read_gb_s": round(limits[0], 1), "fma_gflop_s": round(limits[1], 1), "rows": rows}  # fmt: skip


def main() -> None:
    """Parse the command line and run one benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    matmul = commands.add_parser("cpu-matmul", help="dense products on the CPU")
    matmul.add_argument("--threads", type=int, default=0, help="default: torch's")
    matmul.add_argument("--isa", default="", help="a built instruction set, see octavo.ops.native.built_isas()")
    matmul.add_argument("--rounds", type=int, default=15)
    matmul.add_argument("--quick", action="store_true", help="two large shapes only")
    args = parser.parse_args()
    native.declare("octavo_probe_read", [native.PTR, native.I64], native.F32)
    native.declare("octavo_probe_fma", [native.I64], native.F64)
    if not native.available():
        parser.exit(1, "no native library: build it with `python setup.py build_ext --inplace`\n")
    if args.isa:
        with native.using(args.isa):
            record = cpu_matmul(args)
    else:
        record = cpu_matmul(args)
    print(json.dumps(record))


if __name__ == "__main__":
    main()
