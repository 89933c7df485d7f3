"""Tiles of a cache of 8 bits a number, widened in registers, for the kernels in Gluon beside it.

Owns how such tiles are read from shared memory, where they lie as words of 16 bits: two channels of a token, and what
is stored in such a cache. Does not know rows or leaves. Invariant: numbers are widened exactly, and an instruction of
the matrix units has the same 16 terms of a sum as over a cache of 16 bits. The scores' terms have other places among
the 16, K's and Q's alike.
"""

# Kernels are compiled from their source by Triton, whose values mypy does not know.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import triton.language as tl
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_LINES, _AHEAD = gl.constexpr(8), gl.constexpr(4)  # of a tile that are widened at a time, and how often asked ahead
_S = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
_A = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]), 2))
_B = gl.constexpr(gl.DotOperandLayout(1, gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]), 2))


@constexpr_function
def _pair(kind, dtype, result, low, high):
    """PTX that widens bytes `low` and `high` of the word x into operand `result`."""
    if kind == "float8":
        text = f"prmt.b32 t, x, x, 0x44{high}{low}; cvt.u16.u32 p, t; "
        if high == low + 1:  # as they lie
            text = "mov.b32 {p, q}, x; " if low == 0 else "mov.b32 {q, p}, x; "
        text += "cvt.rn.f16x2.e4m3x2 t, p; "
        if dtype == "fp16":
            return text + f"mov.b32 ${result}, t; "
        text += "mov.b32 {a, b}, t; cvt.f32.f16 f, a; cvt.f32.f16 g, b; "
    else:  # the last bits of 2^23 + 128 + a number
        text = f"prmt.b32 t, x, 0x4B000000, 0x744{low}; mov.b32 f, t; sub.rn.f32 f, f, 0f4B000080; "
        text += f"prmt.b32 t, x, 0x4B000000, 0x744{high}; mov.b32 g, t; sub.rn.f32 g, g, 0f4B000080; "
    return text + f"cvt.rn.{'f16x2' if dtype == 'fp16' else 'bf16x2'}.f32 ${result}, g, f; "


@constexpr_function
def _widening(kind, dtype, first, second):
    """PTX of a word of four numbers as two words of two: of bytes 0 and `first`, and of `second` and 3."""
    begin = "xor.b32 x, $2, 0x80808080; " if kind == "int8" else "mov.b32 x, $2; "
    pairs = _pair(kind, str(dtype), 0, 0, first) + _pair(kind, str(dtype), 1, second, 3)
    return "{ .reg .b32 t, x; .reg .b16 p, q, a, b; .reg .f32 f, g; " + begin + pairs + "}"


@gluon.jit
def _widened(words, dtype: gl.constexpr, FIRST: gl.constexpr, SECOND: gl.constexpr, NARROW: gl.constexpr):
    """Bytes 0 and FIRST, and SECOND and 3, of each two words."""
    text: gl.constexpr = _widening(NARROW, dtype, FIRST, SECOND)
    if dtype == gl.bfloat16:
        both = gl.inline_asm_elementwise(text, "=r,=r,r", [words], (gl.bfloat16, gl.bfloat16), True, 2)
    else:
        both = gl.inline_asm_elementwise(text, "=r,=r,r", [words], (gl.float16, gl.float16), True, 2)
    return both


@gluon.jit
def queries_of(q, HEAD: gl.constexpr):
    """Q [lines, HEAD], in any layout, as the operand that K of `keys_of` is multiplied with: [HEAD, lines].

    In each 16 channels the place 8 w + 2 l + e is that of channel 4 l + 2 w + e.
    """
    LINES: gl.constexpr = q.shape[0]
    q = gl.permute(gl.reshape(q, [LINES, HEAD // 16, 4, 2, 2]), (0, 1, 3, 2, 4))
    return gl.convert_layout(gl.permute(gl.reshape(q, [LINES, HEAD]), (1, 0)), _B)


@gluon.jit
def keys_of(tile, dtype: gl.constexpr, NARROW: gl.constexpr):
    """K [tokens, channels] of a tile of words in shared memory, its channels in the order of `queries_of`.

    NARROW: what the cache holds, "float8" (e4m3) or "int8".
    """
    TOKENS: gl.constexpr = tile.shape[0]
    WORDS: gl.constexpr = tile.shape[1]
    first, second = _widened(tile.load(_A), dtype, 1, 2, NARROW)
    both = gl.permute(gl.reshape(gl.join(first, second), [TOKENS, WORDS // 8, 8, 2]), (0, 1, 3, 2))
    return gl.convert_layout(gl.reshape(both, [TOKENS, 2 * WORDS]), _A, assert_trivial=True)


@gluon.jit
def values_of(words, dtype: gl.constexpr, NARROW: gl.constexpr):
    """V of the even channels and of the odd ones, [channels / 2, tokens] each, from words that lie so."""
    return _widened(words, dtype, 2, 1, NARROW)


@gluon.jit
def whole(even, odd):
    """Sums of even and of odd channels [channels / 2, lines] as those of all channels [channels, lines]."""
    both = gl.permute(gl.join(even, odd), (0, 2, 1))
    return gl.convert_layout(gl.reshape(both, [2 * even.shape[0], even.shape[1]]), _S)


@gluon.jit
def widen_tile(tile, target, NARROW: gl.constexpr):
    """A tile of words as numbers of 16 bits, from and to shared memory: few at a time, for threads of few registers."""
    TOKENS: gl.constexpr = tile.shape[0]
    HEAD: gl.constexpr = target.shape[1]
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD, HEAD // 8], [4, 1], [1, 0])
    BYTES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=HEAD, element_bitwidth=8, rank=2)
    text: gl.constexpr = _widening(NARROW, target.dtype, 1, 2)
    tile = tile._reinterpret(gl.int8, [TOKENS, HEAD], BYTES)
    for first in gl.static_range(0, TOKENS, _AHEAD * _LINES):
        words = ()
        for part in gl.static_range(_AHEAD):
            words = words + (tile.slice(first + part * _LINES, _LINES, 0).load(LINES),)  # noqa: RUF005
        for part in gl.static_range(_AHEAD):
            if target.dtype == gl.bfloat16:
                numbers = gl.inline_asm_elementwise(text, "=r,=r,r", [words[part]], gl.bfloat16, True, 4)
            else:
                numbers = gl.inline_asm_elementwise(text, "=r,=r,r", [words[part]], gl.float16, True, 4)
            target.slice(first + part * _LINES, _LINES, 0).store(numbers)


@gluon.jit
def narrowed(x, scale, NARROW: gl.constexpr):
    """Numbers as a cache keeps them: divided by the scale, cut and rounded. As `octavo.ops.rope.gpu.store_rounded`.

    NARROW "": as they are.
    """
    if NARROW == "":
        kept = x
    elif NARROW == "int8":
        cut = tl.clamp(tl.div_rn(x.to(gl.float32), scale), -127.0, 127.0, propagate_nan=tl.PropagateNan.ALL)
        kept = gl.where(cut == cut, (cut + 12582912.0) - 12582912.0, 0.0).to(gl.int8)
    else:
        cut = tl.clamp(tl.div_rn(x.to(gl.float32), scale), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        kept = cut.to(gl.float8e4nv)
    return kept
