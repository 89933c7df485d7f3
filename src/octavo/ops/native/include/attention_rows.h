// The inner loops of attention: a few query rows against one tile of keys or values, in registers.
//
// Which rows share a pass, and how channels are cut, does not enter a result: a dot product is 16 lane sums closed by
// vec.h's tree, a weighted sum of values runs over the tokens in ascending order.
#pragma once

#include <algorithm>

#include "vec.h"

namespace octavo {

constexpr int TILE = 32;                 // octavo.ops.attention.TILE
constexpr int QUAD = 4;                  // tokens per step of the dot products
constexpr int MICRO = VL == 16 ? 4 : 2;  // query rows that share one pass over K or V in registers

// Tokens of a tile, or positions.
struct Range {
    int64_t begin, end;
    bool empty() const { return begin >= end; }
};

// The same part of the next tile's cache rows. Decode waits for memory, so it asks a tile early, and evenly: a burst of
// requests would stall the loads behind it.
struct Ahead {
    const char* const* rows = nullptr;
    int64_t first = 0, element = 0;  // bytes

    OCTAVO_INLINE void fetch(int64_t t, int64_t channel) const {
        if (rows != nullptr) __builtin_prefetch(rows[t] + first + channel * element);
    }
};

// tanh to 2 ulp: Cephes' polynomial near 0, 1 - 2 / (e^2|x| + 1) elsewhere.
OCTAVO_INLINE vf vtanh(vf x) {
    vf size = x < 0.0f ? -x : x, z = x * x;
    vf p = fma(splat(-5.70498872745e-3f), z, splat(2.06390887954e-2f));
    p = fma(p, z, splat(-5.37397155531e-2f));
    p = fma(p, z, splat(1.33314422036e-1f));
    p = fma(p, z, splat(-3.33332819422e-1f));
    vf near = fma(p * z, x, x);
    vf far = 1.0f - 2.0f / (vexp(size + size) + 1.0f);
    far = x < 0.0f ? -far : far;
    return size < 0.625f ? near : far;
}

// e^x for x <= 0 to 2 ulp, 0 below -87; NaN stays NaN. vec.h's polynomial, shorter for the half range and by fused
// multiply-adds.
OCTAVO_INLINE vf vexp_weight(vf x) {
    const float magic = 12583039.0f;  // 1.5 * 2^23 + 127: leaves the biased exponent in the low bits
    vf clamped = vmax(splat(-87.0f), x);
    vf shifted = fma(clamped, splat(1.44269504088896341f), splat(magic));
    vf n = shifted - magic;
    vf r = fma(n, splat(-0.693359375f), clamped);
    r = fma(n, splat(2.12194440e-4f), r);
    vf p = fma(r, splat(1.9875691500e-4f), splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r) + 1.0f;
    vf e = p * as_float(as_int(shifted) << 23);
    return x < -87.0f ? vf{} : e;
}

// Sums over the 16 lanes (vec.h's tree) of `R` x QUAD dot products at once: out[r][t] = sum of lanes of a[r][t].
template <int R>
OCTAVO_INLINE void close_dots(const lanes16 (&a)[R][QUAD], float* out, int64_t stride) {
#if defined(__AVX512F__)
    __m512 y[QUAD];
    OCTAVO_UNROLL
    for (int t = 0; t < QUAD; ++t) {  // lanes + 8, then + 4; 128-bit part r belongs to row r
        __m512 r0 = (__m512)a[0][t].v[0], r1 = (__m512)a[1 % R][t].v[0];
        __m512 r2 = (__m512)a[2 % R][t].v[0], r3 = (__m512)a[3 % R][t].v[0];
        __m512 u = _mm512_add_ps(_mm512_shuffle_f32x4(r0, r1, 0x44), _mm512_shuffle_f32x4(r0, r1, 0xee));
        __m512 v = _mm512_add_ps(_mm512_shuffle_f32x4(r2, r3, 0x44), _mm512_shuffle_f32x4(r2, r3, 0xee));
        y[t] = _mm512_add_ps(_mm512_shuffle_f32x4(u, v, 0x88), _mm512_shuffle_f32x4(u, v, 0xdd));
    }
    __m512 u = _mm512_add_ps(_mm512_shuffle_ps(y[0], y[1], 0x44), _mm512_shuffle_ps(y[0], y[1], 0xee));
    __m512 v = _mm512_add_ps(_mm512_shuffle_ps(y[2], y[3], 0x44), _mm512_shuffle_ps(y[2], y[3], 0xee));
    float sums[16];
    _mm512_storeu_ps(sums, _mm512_add_ps(_mm512_shuffle_ps(u, v, 0x88), _mm512_shuffle_ps(u, v, 0xdd)));
    for (int r = 0; r < R; ++r) std::memcpy(out + r * stride, sums + 4 * r, 16);
#elif defined(__AVX2__)
    __m256 y[QUAD];
    OCTAVO_UNROLL
    for (int t = 0; t < QUAD; ++t) {
        __m256 r0 = (__m256)(a[0][t].v[0] + a[0][t].v[1]), r1 = (__m256)(a[1 % R][t].v[0] + a[1 % R][t].v[1]);
        y[t] = _mm256_add_ps(_mm256_permute2f128_ps(r0, r1, 0x20), _mm256_permute2f128_ps(r0, r1, 0x31));
    }
    __m256 u = _mm256_add_ps(_mm256_shuffle_ps(y[0], y[1], 0x44), _mm256_shuffle_ps(y[0], y[1], 0xee));
    __m256 v = _mm256_add_ps(_mm256_shuffle_ps(y[2], y[3], 0x44), _mm256_shuffle_ps(y[2], y[3], 0xee));
    float sums[8];
    _mm256_storeu_ps(sums, _mm256_add_ps(_mm256_shuffle_ps(u, v, 0x88), _mm256_shuffle_ps(u, v, 0xdd)));
    for (int r = 0; r < R; ++r) std::memcpy(out + r * stride, sums + 4 * r, 16);
#else
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < QUAD; ++t) out[r * stride + t] = reduce_add(a[r][t]);
#endif
}

// scores[r][begin .. end) of R query rows; may also write up to QUAD - 1 entries beyond, never past TILE.
template <int R>
void dot_rows(const float* q, int64_t padded, const float* const* keys, Range range, float* scores, Ahead ahead) {
    for (int64_t t = range.begin / QUAD * QUAD; t < range.end; t += QUAD) {
        const float* k[QUAD];
        for (int i = 0; i < QUAD; ++i) k[i] = keys[std::min(std::max(t + i, range.begin), range.end - 1)];
        lanes16 sums[R][QUAD];
        OCTAVO_UNROLL
        for (int half = 0; half < lanes16::NV; ++half) {
            vf s[R][QUAD] = {};
            for (int64_t c = half * VL; c < padded; c += 16) {
                vf x[QUAD];
                OCTAVO_UNROLL
                for (int i = 0; i < QUAD; ++i) x[i] = load(k[i] + c), ahead.fetch(t + i, c);
                OCTAVO_UNROLL
                for (int r = 0; r < R; ++r) {
                    vf y = load(q + r * padded + c);
                    OCTAVO_UNROLL
                    for (int i = 0; i < QUAD; ++i) s[r][i] = fma(y, x[i], s[r][i]);
                }
            }
            OCTAVO_UNROLL
            for (int r = 0; r < R; ++r)
                OCTAVO_UNROLL
                for (int i = 0; i < QUAD; ++i) sums[r][i].v[half] = s[r][i];
        }
        close_dots<R>(sums, scores + t, TILE);
    }
}

// acc[r][channels] += weights[r][t] * values[t][channels] over t in range, ascending; C vectors of channels.
template <int R, int C>
OCTAVO_INLINE void add_values(float* acc, int64_t padded, const float* weights, const float* const* values,
                              int64_t channel, Range range, Ahead ahead) {
    vf a[R][C];
    OCTAVO_UNROLL
    for (int r = 0; r < R; ++r)
        OCTAVO_UNROLL
        for (int c = 0; c < C; ++c) a[r][c] = load(acc + r * padded + channel + c * VL);
    for (int64_t t = range.begin; t < range.end; ++t) {
        const float* value = values[t] + channel;
        vf x[C];
        OCTAVO_UNROLL
        for (int c = 0; c < C; ++c) x[c] = load(value + c * VL), ahead.fetch(t, channel + c * VL);
        OCTAVO_UNROLL
        for (int r = 0; r < R; ++r) {
            vf w = splat(weights[r * TILE + t]);
            OCTAVO_UNROLL
            for (int c = 0; c < C; ++c) a[r][c] = fma(w, x[c], a[r][c]);
        }
    }
    OCTAVO_UNROLL
    for (int r = 0; r < R; ++r)
        OCTAVO_UNROLL
        for (int c = 0; c < C; ++c) store(acc + r * padded + channel + c * VL, a[r][c]);
}

template <int R>
void weigh_rows(float* acc, int64_t padded, const float* weights, const float* const* values, Range range,
                Ahead ahead) {
    int64_t c = 0;
    for (; c + 4 * VL <= padded; c += 4 * VL) add_values<R, 4>(acc, padded, weights, values, c, range, ahead);
    for (; c + 2 * VL <= padded; c += 2 * VL) add_values<R, 2>(acc, padded, weights, values, c, range, ahead);
    for (; c < padded; c += VL) add_values<R, 1>(acc, padded, weights, values, c, range, ahead);
}

}  // namespace octavo
