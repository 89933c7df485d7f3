// Transpositions of 4-byte words, and copies past the caches, a line of a cache at a time: what weights and keys go
// through on their way into panels.
#pragma once

#include "vec.h"

namespace octavo {

constexpr int LINE_WORDS = 16;

typedef uint32_t Line __attribute__((vector_size(4 * LINE_WORDS)));

// `count` bytes of a row, zero beyond them.
OCTAVO_INLINE Line read_line(const char* from, int64_t count) {
#if defined(__AVX512F__)
    const __mmask32 mask = count < 64 ? (__mmask32(1) << (count < 0 ? 0 : count) / 2) - 1 : ~__mmask32(0);
    return (Line)_mm512_maskz_loadu_epi16(mask, from);
#else
    if (count >= int64_t(sizeof(Line))) return load_bits<Line>(from);
    Line line{};
    if (count > 0) std::memcpy(&line, from, count);
    return line;
#endif
}

// 16 lines -> their columns, each 16 words behind one another, `stride` bytes from one to the next.
OCTAVO_INLINE void transpose_lines(const Line (&lines)[LINE_WORDS], char* to, int64_t stride) {
#if defined(__AVX512F__)
    __m512i a[16], b[16];
    OCTAVO_UNROLL for (int t = 0; t < 16; ++t) a[t] = (__m512i)lines[t];
    OCTAVO_UNROLL for (int t = 0; t < 16; t += 2) {
        b[t] = _mm512_unpacklo_epi32(a[t], a[t + 1]);
        b[t + 1] = _mm512_unpackhi_epi32(a[t], a[t + 1]);
    }
    OCTAVO_UNROLL for (int t = 0; t < 16; t += 4) {  // a[t + i]: word i of each 128-bit part, of lines t to t + 3
        a[t] = _mm512_unpacklo_epi64(b[t], b[t + 2]);
        a[t + 1] = _mm512_unpackhi_epi64(b[t], b[t + 2]);
        a[t + 2] = _mm512_unpacklo_epi64(b[t + 1], b[t + 3]);
        a[t + 3] = _mm512_unpackhi_epi64(b[t + 1], b[t + 3]);
    }
    OCTAVO_UNROLL for (int i = 0; i < 4; ++i) {  // words i, 4 + i, 8 + i, 12 + i
        __m512i u0 = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x44), u1 = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xee);
        __m512i v0 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x44);
        __m512i v1 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xee);
        _mm512_storeu_si512(to + i * stride, _mm512_shuffle_i32x4(u0, v0, 0x88));
        _mm512_storeu_si512(to + (4 + i) * stride, _mm512_shuffle_i32x4(u0, v0, 0xdd));
        _mm512_storeu_si512(to + (8 + i) * stride, _mm512_shuffle_i32x4(u1, v1, 0x88));
        _mm512_storeu_si512(to + (12 + i) * stride, _mm512_shuffle_i32x4(u1, v1, 0xdd));
    }
#else
    for (int t = 0; t < LINE_WORDS; ++t)
        for (int i = 0; i < LINE_WORDS; ++i) {
            const uint32_t word = lines[t][i];
            std::memcpy(to + i * stride + 4 * t, &word, 4);
        }
#endif
}

// Copies whole lines past the caches, to where a line begins: memory that is written and not read soon is not read
// first either, which takes longer than the copy. Threads that are told of it see it behind `end_streams`.
OCTAVO_INLINE void stream_lines(char* to, const char* from, int64_t bytes) {
#if defined(__AVX512F__)
    for (int64_t i = 0; i < bytes; i += 64) _mm512_stream_si512((__m512i*)(to + i), load_bits<__m512i>(from + i));
#elif defined(__AVX2__)
    for (int64_t i = 0; i < bytes; i += 32) _mm256_stream_si256((__m256i*)(to + i), load_bits<__m256i>(from + i));
#else
    std::memcpy(to, from, bytes);
#endif
}
OCTAVO_INLINE void end_streams() {
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

}  // namespace octavo
