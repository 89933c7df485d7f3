"""Staged writes on the GPU: one kernel for the writes to any number of tensors.

Owns the kernel and the layout of what it reads. Does not know which tensor a run belongs to: a run names the address.
Invariant: runs of one launch do not overlap, so their order is free. Its reference implementation is
`octavo.ops.inputs.staged_write`.
"""

# Kernels are compiled from their source by Triton, whose values mypy does not know.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

WORDS_PER_RUN = 4  # a run is an int64 address, an int32 first word of its values, an int32 count of words
_BLOCK = 256  # words per program


@triton.jit(do_not_specialize_on_alignment=["upload"])
def _write(upload, BLOCK: tl.constexpr):
    run = tl.program_id(0)
    header = upload.to(tl.pointer_type(tl.int64), bitcast=True) + 2 * run
    address = tl.load(header)
    span = tl.load(header + 1)
    first, count = span & 0xFFFFFFFF, span >> 32
    at = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(upload + first + at, mask=at < count)
    tl.store(address.to(tl.pointer_type(tl.int32)) + at, words, mask=at < count)


class RunWriter:
    """Launches the kernel on one device. It has one signature: looking it up would cost more than the launch."""

    def __init__(self) -> None:
        """The first launch compiles or loads it."""
        self._kernel: Any = None

    def __call__(self, upload: torch.Tensor, num_runs: int, max_count: int) -> None:
        """Write each run's values to its address.

        upload: int32, contiguous, 8-byte aligned, on the device or in pinned memory: `num_runs` headers (see
        WORDS_PER_RUN), then the values; `first` counts from the start of `upload`. Wider elements are pairs of words.
        max_count: words of the longest run.
        """
        grid = (num_runs, triton.cdiv(max_count, _BLOCK), 1)
        if self._kernel is None:
            self._kernel = _write[grid](upload, BLOCK=_BLOCK, num_warps=2)  # still None where Triton interprets
        else:
            self._kernel[grid](upload, _BLOCK)
