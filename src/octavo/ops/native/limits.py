"""The limits of this machine that CPU operators are measured against, probed by native loops.

Owns the probes' timing. Invariant: what is returned was reached by this process, with the threads in force, just now.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from octavo.ops import native

native.declare("octavo_probe_read", [native.PTR, native.I64], native.F32)
native.declare("octavo_probe_products", [native.I64, native.I32], native.F64)

_FLOATS = 64 << 20  # 256 MiB: more than any last-level cache


def best_seconds(call: Callable[[], object], rounds: int, round_seconds: float = 0.02) -> float:
    """Time of one call: the best of `rounds` averages, each over about `round_seconds`."""
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


def measure_limits(rounds: int = 15) -> tuple[float, float]:
    """Streaming reads in GB/s and float32 multiply-adds in GFLOP/s. Needs the native library."""
    library = native.lib()
    data = torch.zeros(_FLOATS)
    library.octavo_advise_huge(data.data_ptr(), _FLOATS * 4)
    read = best_seconds(lambda: library.octavo_probe_read(data.data_ptr(), _FLOATS), rounds)
    return _FLOATS * 4 / read / 1e9, _products(rounds, pairs=False)


def measure_pairs(rounds: int = 15) -> float:
    """Multiply-adds of bfloat16 in pairs, in GFLOP/s: the processor's, or those of the emulation."""
    return _products(rounds, pairs=True)


def _products(rounds: int, *, pairs: bool) -> float:
    library = native.lib()
    work = library.octavo_probe_products(100_000, pairs)
    return float(
        work * 2 / best_seconds(lambda: library.octavo_probe_products(100_000, pairs), 5 * rounds, 0.005) / 1e9
    )
