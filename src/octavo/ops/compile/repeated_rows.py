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
def _stack(times):
    """Of [times, 64, 8]: `_S`, once it is seen as 64 * times lines."""
    registers = [[0, 0, 1], [0, 8, 0], *[[1 << i, 0, 0] for i in range(times.bit_length() - 1)]]
    lanes = [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 16, 0], [0, 32, 0]], [], [times, 64, 8])


@gluon.jit
def repeated(x, TIMES: gl.constexpr):
    """x [64, 8] again and again: [64 * TIMES, 8]."""
    deep: gl.constexpr = _stack(TIMES)
    x = gl.convert_layout(x, gl.SliceLayout(0, deep), assert_trivial=True)[None, :, :]
    x = gl.broadcast(x, gl.zeros([TIMES, 64, 8], x.dtype, deep))[0]
    return gl.convert_layout(gl.reshape(x, [64 * TIMES, 8]), _S, assert_trivial=True)
