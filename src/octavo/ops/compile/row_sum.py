"""The one order in which elementwise GPU kernels sum a row.

Owns the tree. Does not know what is summed. Invariant: the tree is a function of the padded length alone, so the bits
do not depend on how a tile lies in registers: on warps, on alignment, or on how many rows a program holds.
"""

# Kernels are compiled from their source by Triton, whose values mypy does not know.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import triton
import triton.language as tl

MIN_LENGTH = 16


def padded_length(size: int) -> int:
    """The power of two that a row of `size` elements is padded to, with zeros."""
    return max(MIN_LENGTH, 1 << (size - 1).bit_length())


@triton.jit
def row_sums(x, LEVELS: tl.constexpr):
    """The sum of each row of x [R, 2 ** LEVELS] float32: [R].

    `tl.sum` over many elements follows the tile's layout; over two it has one order only. First neighbours meet, three
    times (a thread's own elements, as loads are 16 bytes wide), then halves, until one is left.
    """
    for _ in tl.static_range(3):
        x = tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), 2)
    for _ in tl.static_range(LEVELS - 3):
        x = tl.sum(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), 1)
    return tl.reshape(x, (x.shape[0],))
