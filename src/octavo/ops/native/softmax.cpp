// The softmax of a router's logits: out[t, i] = e^(x[t, i] - max) * (1 / sum).
//
// A row of fewer than 16 is summed in ascending order; of a longer one element i joins lane i modulo 16, then lanes meet
// by halves (lanes16). These are the steps of torch with AVX-512, its exp included (Sleef's expf, within 1 ulp), so that
// every instruction set has the bits that torch alone gives there.
#include "include/operators.h"

namespace octavo {

// e^x for x <= 0 or NaN.
static OCTAVO_INLINE vf exp_below(vf x) {
    const float magic = 12582912.0f;  // see vexp
    vf q = (vmax(splat(-105.0f), x) * 1.442695040888963407f + magic) - magic;
    vf s = fma(q, splat(-0.693145751953125f), x);
    s = fma(q, splat(-1.428606765330187045e-06f), s);
    vf u = fma(splat(0.000198527617612853646278381f), s, splat(0.00139304355252534151077271f));
    u = fma(u, s, splat(0.00833336077630519866943359f));
    u = fma(u, s, splat(0.0416664853692054748535156f));
    u = fma(u, s, splat(0.166666671633720397949219f));
    u = fma(u, s, splat(0.5f));
    u = fma(s * s, u, s) + 1.0f;
    vi n = as_int(q + magic) - 0x4b400000, half = n >> 1;
    vf y = (u * as_float((half + 127) << 23)) * as_float((n - half + 127) << 23);
    return x < -104.0f ? splat(0.0f) : y;
}

// A NaN in the row may be passed over: it makes the sum NaN.
static float most_of(const float* x, int64_t n) {
    if (n < 16) {
        float most = x[0];
        for (int64_t i = 1; i < n; ++i) most = x[i] > most ? x[i] : most;
        return most;
    }
    lanes16 most = lanes16::load(x);
    for (int64_t i = 16; i < n; i += 16) {
        const lanes16 more = lanes16::load(x + (n - i < 16 ? n - 16 : i));
        for (int v = 0; v < lanes16::NV; ++v) most.v[v] = vmax(more.v[v], most.v[v]);
    }
    return reduce_max(most);
}

static float sum_of(const float* e, int64_t n) {
    if (n < 16) {
        float sum = e[0];
        for (int64_t i = 1; i < n; ++i) sum += e[i];
        return sum;
    }
    lanes16 sum = lanes16::load(e);
    int64_t i = 16;
    for (; i + 16 <= n; i += 16)
        for (int v = 0; v < lanes16::NV; ++v) sum.v[v] = sum.v[v] + load(e + i + v * VL);
    if (i < n) {
        float rest[16] = {};  // what is not there adds 0 to a lane that is no -0
        std::memcpy(rest, e + i, sizeof(float) * (n - i));
        for (int v = 0; v < lanes16::NV; ++v) sum.v[v] = sum.v[v] + load(rest + v * VL);
    }
    return reduce_add(sum);
}

static void softmax_row(const float* x, float* out, int64_t n) {
    const int64_t whole = n / VL * VL, rest = n - whole;
    const float most = most_of(x, n);
    for (int64_t i = 0; i < whole; i += VL) store(out + i, exp_below(load(x + i) - most));
    if (rest) store_first(out + whole, exp_below(load_first(x + whole, rest) - most), rest);
    const float factor = 1.0f / sum_of(out, n);
    for (int64_t i = 0; i < whole; i += VL) store(out + i, load(out + i) * factor);
    for (int64_t i = whole; i < n; ++i) out[i] *= factor;
}

}  // namespace octavo

// x [rows, n] float32 with its row stride in elements; out [rows, n] contiguous, not x. n is at least 1.
OCTAVO_API void octavo_softmax(const float* x, int64_t x_stride, float* out, int64_t rows, int64_t n) {
    using namespace octavo;
    parallel_ranges(threads_for(rows * n, 16384), rows, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) softmax_row(x + t * x_stride, out + t * n, n);
    });
}
