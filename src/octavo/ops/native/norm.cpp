// RMS norm of rows, alone or after a residual addition.
//
// The sum of squares is one halving tree over the row padded with zeros to a power of two: level by level, element i
// is added to element i + n/2. It is a function of the row length alone, has no serial chain, and rms_norm_reference
// evaluates it in torch with the same bits. No fused multiply-add anywhere in this file.
#include <cmath>

#include "include/operators.h"

namespace octavo {

// out[i] = a[i] + b[i] for i < n; n is a multiple of VL or smaller than VL.
static OCTAVO_INLINE void add_halves(float* out, const float* a, const float* b, int64_t n) {
    int64_t i = 0;
    for (; i + VL <= n; i += VL) store(out + i, load(a + i) + load(b + i));
    for (; i < n; ++i) out[i] = a[i] + b[i];
}

// Sum of row[i]^2 over the tree. `buffer` holds `padded` floats; row[n..padded) counts as zeros.
static float sum_of_squares(const float* row, int64_t n, int64_t padded, float* buffer) {
    int64_t i = 0;
    for (; i + VL <= n; i += VL) {
        vf x = load(row + i);
        store(buffer + i, x * x);
    }
    for (; i < n; ++i) buffer[i] = row[i] * row[i];
    // The upper half is short of padded - n zeros; adding a zero to a square changes nothing, so it is left out.
    int64_t half = padded / 2;
    if (half > 0) {
        int64_t upper = n - half;
        add_halves(buffer, buffer, buffer + half, upper / VL * VL);
        for (i = upper / VL * VL; i < upper; ++i) buffer[i] += buffer[i + half];
    }
    for (half /= 2; half > 0; half /= 2) add_halves(buffer, buffer, buffer + half, half);
    return buffer[0];
}

template <class T>
struct NormArgs {
    const T* x;
    int64_t x_stride;
    const T* residual;  // null: no addition
    int64_t residual_stride;
    const float* weight;
    T* out;
    T* sum_out;
    int64_t n;
    float eps;
};

template <class T>
static void norm_row(const NormArgs<T>& args, int64_t t, int64_t padded, float* row, float* buffer) {
    const int64_t n = args.n, whole = n / VL * VL, rest = n - whole;
    const T* x = args.x + t * args.x_stride;
    for (int64_t i = 0; i < whole; i += VL) store(row + i, load(x + i));
    if (rest) store_first(row + whole, load_first(x + whole, rest), rest);
    if (args.residual) {
        const T* residual = args.residual + t * args.residual_stride;
        T* sum = args.sum_out + t * n;
        for (int64_t i = 0; i < whole; i += VL) {
            store(sum + i, load(row + i) + load(residual + i));
            store(row + i, load(sum + i));  // the norm is of the rounded sum
        }
        if (rest) {
            vf total = load_first(row + whole, rest) + load_first(residual + whole, rest);
            store_first(sum + whole, total, rest);
            store_first(row + whole, load_first(sum + whole, rest), rest);
        }
    }
    float mean = sum_of_squares(row, n, padded, buffer) / float(n);
    vf scale = splat(1.0f / std::sqrt(mean + args.eps));
    T* out = args.out + t * n;
    for (int64_t i = 0; i < whole; i += VL) store(out + i, load(row + i) * scale * load(args.weight + i));
    if (rest) {
        vf y = load_first(row + whole, rest) * scale * load_first(args.weight + whole, rest);
        store_first(out + whole, y, rest);
    }
}

template <class T>
static void norm_rows(const NormArgs<T>& args, int64_t rows) {
    int64_t padded = 1;
    while (padded < args.n) padded *= 2;
    parallel_ranges(threads_for(rows * args.n, 16384), rows, [&](int64_t begin, int64_t end) {
        static thread_local Scratch scratch;
        float* row = scratch.floats(2 * padded + 2 * VL);
        for (int64_t t = begin; t < end; ++t) norm_row(args, t, padded, row, row + padded + VL);
    });
}

template <class T>
static void run(const void* x, int64_t x_stride, const void* residual, int64_t residual_stride, const float* weight,
                void* out, void* sum_out, int64_t rows, int64_t n, float eps) {
    norm_rows(NormArgs<T>{static_cast<const T*>(x), x_stride, static_cast<const T*>(residual), residual_stride, weight,
                          static_cast<T*>(out), static_cast<T*>(sum_out), n, eps},
              rows);
}

}  // namespace octavo

// x [rows, n] and residual [rows, n] (null: none) with row strides in elements; out and sum_out are contiguous.
OCTAVO_API void octavo_rms_norm(const void* x, int64_t x_stride, const void* residual, int64_t residual_stride,
                                const float* weight, void* out, void* sum_out, int64_t rows, int64_t n, float eps,
                                int32_t dtype) {
    auto* run = dtype == octavo::F32 ? octavo::run<float> : octavo::run<octavo::bf16>;
    run(x, x_stride, residual, residual_stride, weight, out, sum_out, rows, n, eps);
}
