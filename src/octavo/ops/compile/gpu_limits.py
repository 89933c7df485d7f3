"""What a GPU can do at most, measured: the yardstick of the benchmarks.

Owns two measurements. Knows no operator of the package. Invariant: medians of repeated runs, on data that is not zero.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from octavo.ops import captures

_REPEATS = 5


def measure_limits() -> tuple[float, float]:
    """(bytes per second of a copy, read and written; operations per second of a bfloat16 product of 8192 cubed)."""
    source = torch.randn(1 << 29, device="cuda").bfloat16()
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / _seconds(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    product = 2 * 8192**3 / _seconds(lambda: a @ b)
    return copy, product


def _seconds(call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(_REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(_REPEATS):
            call()
        end.record()
        captures.wait_for_device()
        times.append(begin.elapsed_time(end) / 1e3 / _REPEATS)
    return statistics.median(times)
