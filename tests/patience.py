"""How long a test may wait on this machine, now.

A test waits for a fact. Where it must give up, or a time itself is what it tests, the seconds are those of a quiet
machine, and `patient` stretches them: by what the processor needs for a fixed piece of work, measured once a process,
and by how many processes share a core at the moment.
"""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path

MAX_STRETCH = 20.0  # of what others take
_LOOPS = 200_000
_NOMINAL_SECONDS = 0.02  # of processor time that the piece of work takes on the machine that the tests were written on


def patient(seconds: float) -> float:
    """`seconds` of a quiet machine, as long as they may take here and now."""
    return seconds * _slowness() * min(max(1.0, _num_competing() / _num_cores()), MAX_STRETCH)


@functools.cache
def _slowness() -> float:
    best = 1e9
    for _ in range(3):
        began, total = time.thread_time(), 0
        for index in range(_LOOPS):
            total += index * index
        best = min(best, time.thread_time() - began)
    return max(1.0, best / _NOMINAL_SECONDS)


def _num_competing() -> float:
    """Processes that run or want to: now, and over the last minute, whichever is more."""
    try:
        last_minute, _, _, now, _ = Path("/proc/loadavg").read_text().split()
    except (OSError, ValueError):
        return 2.0 * _num_cores()
    return max(float(last_minute), float(now.partition("/")[0]))


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
