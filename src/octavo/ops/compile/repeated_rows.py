"""Rows of a matrix instruction's result, again and again, for kernels in Gluon that multiply with ones.

Owns the layouts. Does not know what the rows are. Invariant: no thread gives another one anything: it has those rows.
"""

# Kernels are compiled from their source by Triton, whose values mypy does not know.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_S = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8]))


@constexpr_function
def _stack(times, lines):
    """Of [times, lines, 8]: `_S`, once it is seen as lines * times lines. Of 16 lines, each warp has all."""
    warps = [[0, 16, 0], [0, 32, 0]] if lines == 64 else [[1, 0, 0], [2, 0, 0]]
    first = 0 if lines == 64 else 2  # of the times, which registers tell apart
    registers = [[0, 0, 1], [0, 8, 0], *[[1 << i, 0, 0] for i in range(first, times.bit_length() - 1)]]
    lanes = [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [times, lines, 8])


@gluon.jit
def repeated(x, TIMES: gl.constexpr):
    """x [16 or 64, 8] again and again: [its lines * TIMES, 8]; at least 64 of them."""
    LINES: gl.constexpr = x.shape[0]
    deep: gl.constexpr = _stack(TIMES, LINES)
    x = gl.convert_layout(x, gl.SliceLayout(0, deep), assert_trivial=True)[None, :, :]
    x = gl.broadcast(x, gl.zeros([TIMES, LINES, 8], x.dtype, deep))[0]
    return gl.convert_layout(gl.reshape(x, [LINES * TIMES, 8]), _S, assert_trivial=True)
