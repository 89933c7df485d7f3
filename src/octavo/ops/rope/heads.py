"""The rotation of heads inside kernels in Gluon: `octavo.ops.rope.gpu._rotated` for halves that are rotated whole.

Owns those operations. Does not know where heads come from or go. Invariant: the operations on a head are those of
`_rotated`, in the same order, whatever the layout; the kernel is compiled without contraction.
"""

# Kernels are compiled from their source by Triton, whose values mypy does not know.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.ops.compile.row_sum import row_sums


@gluon.jit
def squares_of(first, second, LEVELS: gl.constexpr):
    """The sums of squares [N] of heads in halves [N, head size / 2]."""
    first, second = first.to(gl.float32), second.to(gl.float32)
    return row_sums(first * first + second * second, LEVELS)


@gluon.jit
def _halves_by_squares(first, second, squares, weights, cosine, sine, eps, NORM: gl.constexpr):
    """Halves of heads, normed by `squares_of` them, rotated and rounded. As `octavo.ops.rope.gpu._rotated`."""
    dtype: gl.constexpr = first.dtype
    first, second = first.to(gl.float32), second.to(gl.float32)
    if NORM:  # a product by a power of two has the bits of the quotient
        inverse = tl.div_rn(1.0, tl.sqrt_rn(squares * (0.5 / first.shape[1]) + eps))
        inverse = gl.convert_layout(inverse, gl.SliceLayout(1, first.type.layout))[:, None]
        first = (first * inverse * weights[0]).to(dtype).to(gl.float32)
        second = (second * inverse * weights[1]).to(dtype).to(gl.float32)
    return (first * cosine - second * sine).to(dtype), (second * cosine + first * sine).to(dtype)


@gluon.jit
def rotated_halves(first, second, weights, cosine, sine, eps, LEVELS: gl.constexpr, NORM: gl.constexpr):
    """Halves of heads [N, head size / 2], normed, rotated and rounded."""
    squares = first
    if NORM:
        squares = squares_of(first, second, LEVELS)
    return _halves_by_squares(first, second, squares, weights, cosine, sine, eps, NORM)


@gluon.jit
def heads_by_squares(first, second, squares, weights, cosine, sine, eps, NORM: gl.constexpr):
    """`rotated_halves`, side by side: [N, head size]. squares: `squares_of` them, anything where nothing is normed."""
    first, second = _halves_by_squares(first, second, squares, weights, cosine, sine, eps, NORM)
    return gl.reshape(gl.permute(gl.join(first, second), (0, 2, 1)), [first.shape[0], 2 * first.shape[1]])


@gluon.jit
def rope_heads(first, second, weights, cosine, sine, eps, LEVELS: gl.constexpr, NORM: gl.constexpr):
    """`rotated_halves`, side by side: [N, head size]."""
    squares = first
    if NORM:
        squares = squares_of(first, second, LEVELS)
    return heads_by_squares(first, second, squares, weights, cosine, sine, eps, NORM)
