// The limits of this processor that operators are measured against: streaming reads, and products in registers.
#include <atomic>

#include "include/pairs.h"

namespace octavo {

static float read_all(const float* data, int64_t count) {
    vf sum[8] = {};
    for (int64_t i = 0; i + 8 * VL <= count; i += 8 * VL)
        OCTAVO_UNROLL for (int j = 0; j < 8; ++j) sum[j] += load(data + i + j * VL);
    vf total = (sum[0] + sum[1]) + (sum[2] + sum[3]) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
    return total[0];
}

template <bool PAIRS>
static float product_loop(int64_t count) {
    vf acc[12], x = splat(1.0f), y = splat(1e-9f);
    for (int j = 0; j < 12; ++j) acc[j] = splat(float(j));  // distinct, or the compiler keeps one chain
    for (int64_t i = 0; i < count; ++i) OCTAVO_UNROLL
        for (int j = 0; j < 12; ++j) acc[j] = PAIRS ? dot_pairs(acc[j], x, y) : fma(x, y, acc[j]);
    vf total = {};
    for (int j = 0; j < 12; ++j) total += acc[j];
    return total[0];
}

}  // namespace octavo

// Read `count` floats once with every thread; shares of 1 MiB go to the next free thread.
OCTAVO_API float octavo_probe_read(const float* data, int64_t count) {
    using namespace octavo;
    constexpr int64_t share = 1 << 18;
    std::atomic<int> sink{0};  // keeps the loops' results alive
    parallel_tasks(num_threads(), (count + share - 1) / share, [&](int64_t task) {
        int64_t left = count - task * share;
        float sum = read_all(data + task * share, left < share ? left : share);
        if (sum == -1.0f) sink = 1;
    });
    return float(sink);
}

// Every thread does `count` x 12 vector FMAs in registers, or steps of pairs of bfloat16; returns the multiply-adds of
// all threads (as a double).
OCTAVO_API double octavo_probe_products(int64_t count, int32_t pairs) {
    using namespace octavo;
    const int threads = num_threads();
    std::atomic<int> sink{0};  // keeps the loops' results alive
    parallel_tasks(threads, threads, [&](int64_t) {
        float sum = pairs ? product_loop<true>(count) : product_loop<false>(count);
        if (sum == -1.0f) sink = 1;
    });
    return sink == 2 ? 0.0 : double(count) * 12 * VL * threads * (pairs ? 2 : 1);
}
