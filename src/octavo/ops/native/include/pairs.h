// Pairs of bfloat16 and their products: one step of the chain that bfloat16 models follow where the processor has it.
//
// A word holds two bfloat16 that follow each other in k, the earlier in the low half. A step adds both products of two
// words to a sum as vdpbf16ps does: the high halves by one fused multiply-add, then the low halves by another, each
// rounded to nearest even; denormals are zeros, in operands and in results (a result is one if it would be after
// rounding to 24 bits without a lowest exponent). AMX sums even and odd k apart: it cannot give these bits.
// Invariant: `dot_pairs` gives the same bits on every instruction set, NaNs being all alike.
#pragma once

#include "vec.h"

namespace octavo {

constexpr uint32_t SIGN = 0x80000000u, LEAST_NORMAL = 0x00800000u;

OCTAVO_INLINE vf splat_word(const void* word) { return as_float(vu{} + load_bits<uint32_t>(word)); }
OCTAVO_INLINE vf low_halves(vf words) { return as_float((vu)words << 16); }
OCTAVO_INLINE vf high_halves(vf words) { return as_float((vu)words & 0xffff0000u); }

// Denormals become zeros of their sign.
OCTAVO_INLINE vf flush(vf x) {
    vu bits = (vu)x;
    return as_float((bits & ~SIGN) < LEAST_NORMAL ? bits & SIGN : bits);
}

// a * b + c without denormals. What rounds up to the least normal number is looked at again 2^64 times larger, where
// nothing is denormal: below it, it is flushed too.
OCTAVO_INLINE vf fma_flushed(vf a, vf b, vf c) {
    vu result = (vu)fma(a, b, c);
    vu larger = (vu)fma(a * 0x1p32f, b * 0x1p32f, c * 0x1p64f) & ~SIGN;
    vu size = result & ~SIGN;
    vu tiny = (vu)(size < LEAST_NORMAL) | ((vu)(size == LEAST_NORMAL) & (vu)(larger < LEAST_NORMAL + (64u << 23)));
    return as_float(tiny != 0 ? result & SIGN : result);
}

// What vdpbf16ps computes, on any processor. Not inlined: the tiles that would hold it are many.
__attribute__((noinline, unused)) static vf dot_pairs_emulated(vf sum, vf x, vf w) {
    sum = fma_flushed(flush(high_halves(x)), flush(high_halves(w)), flush(sum));
    return fma_flushed(flush(low_halves(x)), flush(low_halves(w)), sum);
}

// sum + the products of words x and w.
OCTAVO_INLINE vf dot_pairs(vf sum, vf x, vf w) {
#if defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)x, (__m512bh)(__m512i)w);
#else
    return dot_pairs_emulated(sum, x, w);
#endif
}

}  // namespace octavo
