// The inner loops of attention of bfloat16 by pairs (pairs.h): queries against a tile of keys, weights against values.
//
// A score is the chain of pairs of channels, as a product with a packed weight whose channels are the tile's tokens. What
// a tile's values add is the chain of its pairs of tokens, (2t, 2t + 1) counted from position 0, on the running sum: a
// token that the query does not see counts as weight 0 and value 0, and a pair of two such tokens is left out. Weights
// are rounded to bfloat16. Which rows share a pass does not enter a result.
#pragma once

#include "attention_rows.h"
#include "panels.h"
#include "transpose.h"

namespace octavo {

constexpr int VALUE_ROWS = VL == 16 ? 6 : 2;  // query rows that share one pass over the pairs of values
static_assert(TILE == NR, "a tile of keys is a panel");

// Floats that `rows` queries of `pairs` words take: blocks as a product's rows.
OCTAVO_INLINE int64_t query_floats(int64_t rows, int64_t pairs) { return (pairs + KC - 1) / KC * rows * ROW; }

// Up to 32 channels of a row as 16 words; zero beyond.
OCTAVO_INLINE void load_words(const bf16* row, int64_t channels, uint32_t* words) {
    if (channels < 32) std::memset(words, 0, 64);
    std::memcpy(words, row, channels < 32 ? 2 * channels : 64);
}

// Words [first, first + 16) of 16 tokens -> 16 rows of the panel, at its columns.
OCTAVO_INLINE void transpose_words(const char* const* tokens, int64_t first, int64_t channels, char* panel) {
    Line lines[LINE_WORDS];
    for (int t = 0; t < LINE_WORDS; ++t) lines[t] = read_line(tokens[t] + 4 * first, 2 * channels);
    transpose_lines(lines, panel, PairPanel::ROW_BYTES);
}

// The keys of a tile as a panel: [pairs, rounded up to 16][TILE] words.
inline void transpose_keys(const char* const* tokens, int64_t head_size, Ahead ahead, float* to) {
    char* panel = reinterpret_cast<char*>(to);
    for (int64_t first = 0; 2 * first < head_size; first += 16, panel += 16 * PairPanel::ROW_BYTES) {
        for (int half = 0; half < 2; ++half)
            transpose_words(tokens + 16 * half, first, head_size - 2 * first, panel + 64 * half);
        for (int t = 0; t < TILE; ++t) ahead.fetch(t, 2 * first);
    }
}

// Scores of MR query rows, a block of `query_floats` each ROW floats apart, for the tile's tokens: [MR][TILE].
template <int MR>
void score_rows(const float* q, int64_t block, int64_t pairs, const float* panel, float* scores) {
    for (int strip = 0; strip < STRIPS; ++strip) {
        vf acc[MR][1][2] = {};
        Walk<1> walk{{reinterpret_cast<const char*>(panel)}, {strip}};
        const float* a = q;
        for (int64_t k = 0; k < pairs; k += KC, a += block) {
            chain<PairPanel, MR, 1, Fetch::NOTHING>(a, walk, pairs - k < KC ? pairs - k : KC, acc);
            walk.rows[0] += PairPanel::panel_bytes(KC);
        }
        for (int m = 0; m < MR; ++m)
            for (int half = 0; half < 2; ++half) store(scores + m * TILE + strip * VL + half * 16, acc[m][0][half]);
    }
}

using ScoreRows = void (*)(const float*, int64_t, int64_t, const float*, float*);

template <int MR = MAX_TILE>
ScoreRows score_rows_for(int rows) {
    if (rows == MR) return score_rows<MR>;
    if constexpr (MR > 1) return score_rows_for<MR - 1>(rows);
    return nullptr;
}

// The values of a tile in pairs of tokens: [TILE / 2][padded] words, zero beyond `size` channels.
inline void pair_values(const char* const* tokens, int64_t first_byte, int64_t size, int64_t padded, Ahead ahead,
                        float* to) {
    for (int t = 0; t < TILE; t += 2, to += padded) {
        const bf16* even = reinterpret_cast<const bf16*>(tokens[t] + first_byte);
        const bf16* odd = reinterpret_cast<const bf16*>(tokens[t + 1] + first_byte);
        for (int64_t c = 0; c < padded; c += VL) {
            const int64_t left = std::max(size - c, int64_t(0));
            vf low = left >= VL ? load(even + c) : load_first(even + c, left);
            vf high = left >= VL ? load(odd + c) : load_first(odd + c, left);
            store(to + c, as_float((vu)low >> 16 | (vu)high));
            ahead.fetch(t, c), ahead.fetch(t + 1, c);
        }
    }
}

// acc[r][C vectors of channels] over the pairs [begin, end) of the tile; the rows' weights are TILE floats apart.
template <int R, int C>
OCTAVO_INLINE void add_pairs(float* acc, int64_t padded, const float* weights, const float* values, int64_t begin,
                             int64_t end) {
    vf a[R][C];
    OCTAVO_UNROLL for (int r = 0; r < R; ++r)
        OCTAVO_UNROLL for (int c = 0; c < C; ++c) a[r][c] = load(acc + r * padded + c * VL);
    for (int64_t p = begin; p < end; ++p) {
        vf v[C];
        OCTAVO_UNROLL for (int c = 0; c < C; ++c) v[c] = load(values + p * padded + c * VL);
        OCTAVO_UNROLL for (int r = 0; r < R; ++r) {
            vf w = splat_word(weights + r * TILE + p);
            OCTAVO_UNROLL for (int c = 0; c < C; ++c) a[r][c] = dot_pairs(a[r][c], w, v[c]);
        }
    }
    OCTAVO_UNROLL for (int r = 0; r < R; ++r)
        OCTAVO_UNROLL for (int c = 0; c < C; ++c) store(acc + r * padded + c * VL, a[r][c]);
}

template <int R>
void weigh_pairs(float* acc, int64_t padded, const float* weights, const float* values, int64_t begin, int64_t end) {
    int64_t c = 0;
    for (; c + 4 * VL <= padded; c += 4 * VL) add_pairs<R, 4>(acc + c, padded, weights, values + c, begin, end);
    for (; c < padded; c += VL) add_pairs<R, 1>(acc + c, padded, weights, values + c, begin, end);
}

using WeighPairs = void (*)(float*, int64_t, const float*, const float*, int64_t, int64_t);

template <int R = VALUE_ROWS>
WeighPairs weigh_pairs_for(int rows) {
    if (rows == R) return weigh_pairs<R>;
    if constexpr (R > 1) return weigh_pairs_for<R - 1>(rows);
    return nullptr;
}

// One token of a pair: the other counts as weight 0 and value 0. weights: the row's.
inline void weigh_half(float* acc, int64_t padded, const float* weights, const float* values, int64_t token) {
    const vu mask = vu{} + (token % 2 ? 0xffff0000u : 0xffffu);
    const vf w = as_float((vu)splat_word(weights + token / 2) & mask);
    for (int64_t c = 0; c < padded; c += VL) {
        vf v = as_float((vu)load(values + token / 2 * padded + c) & mask);
        store(acc + c, dot_pairs(load(acc + c), w, v));
    }
}

// The tokens of `range` of one row: halves at its ends where those are odd.
inline void weigh_range(float* acc, int64_t padded, const float* weights, const float* values, Range range) {
    if (range.empty()) return;
    if (range.begin % 2) weigh_half(acc, padded, weights, values, range.begin++);
    if (range.end / 2 > range.begin / 2)
        weigh_pairs<1>(acc, padded, weights, values, range.begin / 2, range.end / 2);
    if (range.end % 2 && range.end > range.begin) weigh_half(acc, padded, weights, values, range.end - 1);
}

}  // namespace octavo
