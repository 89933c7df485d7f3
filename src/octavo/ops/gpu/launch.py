"""Launches that begin before the kernel ahead of them has ended (programmatic dependent launch, Hopper and later).

Owns the options of such a launch and the calls that a kernel makes. A kernel with `PDL` calls `begin_after`, or
`wait_before` and later `end_before`, before it reads what another kernel wrote and before it writes anything; one
program at least does so on every path, for the kernel after it relies on that.
What it reads before are constants: weights, and, behind a kernel that calls `begin_whole`, what was written ahead of
that one. A forward pass begins with such a kernel, `octavo.ops.gpu.embedding`'s: in its layers the step's lengths,
tables, slots and positions are constants, and so is what the cache holds of earlier steps. Invariant: no bit depends on
how a kernel was launched.
"""

# Kernels are compiled from their source by Triton, whose values mypy does not know.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import functools
import threading
from typing import Any

import torch
import triton
import triton.language as tl

_NAMING = threading.Lock()


@triton.jit
def begin_after(PDL: tl.constexpr):
    """Let the next kernel be launched, and wait until the one before is done and its writes are seen."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def begin_whole(PDL: tl.constexpr):
    """Wait until all before is done and its writes are seen, and only then let the next kernel be launched."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_before(PDL: tl.constexpr):
    """Wait until the kernel before is done and its writes are seen."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def end_before(PDL: tl.constexpr):
    """Let the next kernel be launched once all programs are here or done, if none did before."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


def chained(device: torch.device) -> dict[str, Any]:
    """Options for the launch of a kernel that takes `PDL` and calls `begin_after`."""
    return {"PDL": True, "launch_pdl": True} if _has_pdl(device) else {"PDL": False}


def name_compiler() -> None:
    """Let Triton sum up its own files, 0.3 s that a process's first launch waits for; or wait for who has begun."""
    try:
        from triton.runtime.cache import triton_key
    except ImportError:  # another Triton
        return
    with _NAMING:  # Triton itself would do it twice
        triton_key()


@functools.cache
def _has_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
