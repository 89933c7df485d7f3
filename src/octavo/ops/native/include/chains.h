// Sums of a scan: products of small matrices as chains of single additions and products, and functions of one number.
//
// Invariant: no fused multiply-add, and each output is one chain over the depth in ascending order, so that
// octavo.ops.scan evaluates them in torch with the same bits.
#pragma once

#include "vec.h"

namespace octavo {

OCTAVO_INLINE vf vabs(vf x) { return as_float(as_int(x) & 0x7fffffff); }

// octavo.ops.scan.softplus, step by step.
OCTAVO_INLINE vf vsoftplus(vf x) {
    vf y = vexp(-vabs(x));
    vf s = y / (y + 2.0f);
    vf square = s * s;
    vf p = square * float(1.0 / 17.0) + float(1.0 / 15.0);
    p = p * square + float(1.0 / 13.0);
    p = p * square + float(1.0 / 11.0);
    p = p * square + float(1.0 / 9.0);
    p = p * square + float(1.0 / 7.0);
    p = p * square + float(1.0 / 5.0);
    p = p * square + float(1.0 / 3.0);
    vf log = (p * square + 1.0f) * (s + s);
    return vmax(splat(0.0f), x) + log;
}
OCTAVO_INLINE float vsoftplus(float x) { return vsoftplus(splat(x))[0]; }
OCTAVO_INLINE float sigmoid(float x) { return 1.0f / (vexp(-x) + 1.0f); }

// Sum of x[i] * y[i], n a multiple of 16: chains in 16 lanes, then the halving tree.
OCTAVO_INLINE float dot16(const float* x, const float* y, int64_t n) {
    lanes16 sum;
    for (int v = 0; v < lanes16::NV; ++v) sum.v[v] = load(x + v * VL) * load(y + v * VL);
    for (int64_t i = 16; i < n; i += 16)
        for (int v = 0; v < lanes16::NV; ++v) sum.v[v] = sum.v[v] + load(x + i + v * VL) * load(y + i + v * VL);
    return reduce_add(sum);
}

struct Nothing {
    OCTAVO_INLINE void operator()() const {}
};

// beside() runs once a step of the depth.
template <int ROWS, int COLS, class Beside = Nothing>
static OCTAVO_INLINE void chain_tile(const float* x, int64_t x_row, int64_t depth, const float* y, int64_t y_row,
                                     float* out, int64_t out_row, const Beside& beside = {}) {
    vf sum[ROWS][COLS];
    OCTAVO_UNROLL for (int r = 0; r < ROWS; ++r)
        OCTAVO_UNROLL for (int c = 0; c < COLS; ++c) sum[r][c] = load(out + r * out_row + c * VL);
    for (int64_t d = 0; d < depth; ++d) {
        vf w[COLS];
        beside();
        OCTAVO_UNROLL for (int c = 0; c < COLS; ++c) w[c] = load(y + d * y_row + c * VL);
        OCTAVO_UNROLL for (int r = 0; r < ROWS; ++r) {
            vf factor = splat(x[r * x_row + d]);
            OCTAVO_UNROLL for (int c = 0; c < COLS; ++c) sum[r][c] = sum[r][c] + factor * w[c];
        }
    }
    OCTAVO_UNROLL for (int r = 0; r < ROWS; ++r)
        OCTAVO_UNROLL for (int c = 0; c < COLS; ++c) store(out + r * out_row + c * VL, sum[r][c]);
}

template <int COLS>
static OCTAVO_INLINE void chain_rows(const float* x, int64_t x_row, int64_t rows, int64_t depth, const float* y,
                                     int64_t y_row, float* out, int64_t out_row) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) chain_tile<4, COLS>(x + r * x_row, x_row, depth, y, y_row, out + r * out_row, out_row);
    for (; r + 2 <= rows; r += 2) chain_tile<2, COLS>(x + r * x_row, x_row, depth, y, y_row, out + r * out_row, out_row);
    for (; r < rows; ++r) chain_tile<1, COLS>(x + r * x_row, x_row, depth, y, y_row, out + r * out_row, out_row);
}

// out[r][c] += x[r][0] y[0][c] + x[r][1] y[1][c] + ..., in that order; columns a multiple of VL. Of one or two rows, a
// decoding row's, lines of y are read whole: they come from memory, and beside() asks for others meanwhile.
template <class Beside = Nothing>
static inline void add_chains(const float* x, int64_t x_row, int64_t rows, int64_t depth, const float* y,
                              int64_t y_row, int64_t columns, float* out, int64_t out_row, const Beside& beside = {}) {
    int64_t c = 0;
    for (; rows <= 2 && c + 4 * VL <= columns; c += 4 * VL) {
        if (rows == 2) chain_tile<2, 4>(x, x_row, depth, y + c, y_row, out + c, out_row, beside);
        else chain_tile<1, 4>(x, x_row, depth, y + c, y_row, out + c, out_row, beside);
    }
    for (; c + 2 * VL <= columns; c += 2 * VL) chain_rows<2>(x, x_row, rows, depth, y + c, y_row, out + c, out_row);
    for (; c < columns; c += VL) chain_rows<1>(x, x_row, rows, depth, y + c, y_row, out + c, out_row);
}

OCTAVO_INLINE int64_t padded16(int64_t n) { return (n + 15) / 16 * 16; }

}  // namespace octavo
