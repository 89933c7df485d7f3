// Row-wise kernels over float32 logits (octavo/ops/sampling/__init__.py, which states the recipe of the random stream).
//
// Rows are spread over threads, a row is never cut, and every sum runs in an order that only the vocabulary's size
// decides. Ties go to the lower token id.
#include <algorithm>
#include <cmath>
#include <vector>

#include "include/vec.h"

namespace octavo {
namespace {

constexpr int64_t GRAIN = 1 << 15;       // logits worth a thread
constexpr float MAX_NOISE = 23.0f;       // above the largest Gumbel noise, -log(-log1p(-2^-33)) = 22.9
constexpr float SMALLEST = -87.0f;       // e^x is taken as 0 below: no denormals
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u;

struct Rows {
    float* data;
    int64_t stride, count, vocab_size;

    float* at(int64_t row) const { return data + row * stride; }
    template <class Body>
    void each(const Body& body) const {
        parallel_tasks(threads_for(count * vocab_size, GRAIN), count, body);
    }
};

OCTAVO_INLINE vf load_or(const float* p, int64_t left, float fill) {
    if (left >= VL) return load(p);
    float tail[VL];
    for (int i = 0; i < VL; ++i) tail[i] = i < left ? p[i] : fill;
    return load(tail);
}

OCTAVO_INLINE bool any(vi mask) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask((__m512i)mask) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps((__m256)mask) != 0;
#else
    int32_t all = 0;
    for (int i = 0; i < VL; ++i) all |= mask[i];
    return all != 0;
#endif
}

OCTAVO_INLINE vi lane_ids() {
    vi ids;
    for (int i = 0; i < VL; ++i) ids[i] = i;
    return ids;
}

// ---- noise -------------------------------------------------------------------------------------------------------

inline uint64_t mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

OCTAVO_INLINE vu uniform_bits(uint64_t key, vu ids) {
    vu h = ids + uint32_t(key);
    h = (h ^ (h >> 16)) * 0x21F0AAADu;
    h = h ^ (h >> 15) ^ uint32_t(key >> 32);
    h = h * 0xD35A2D97u;
    return h ^ (h >> 15);
}

// ln(1 + x) where `whole` = 1 + x, positive and normal, to 2 ulp; x is used where `whole` lies next to 1 (Cephes' logf).
OCTAVO_INLINE vf vlog1p_parts(vf whole, vf x) {
    vi bits = as_int(whole) - 0x3f3504f3;  // sqrt(1/2): mantissas from there to sqrt(2)
    vi exponent = bits >> 23;
    vf mantissa = as_float((bits & 0x007fffff) + 0x3f3504f3);
    vf y = exponent == 0 ? x : mantissa - 1.0f;
    vf z = y * y, e = __builtin_convertvector(exponent, vf);
    vf p = fma(splat(7.0376836292e-2f), y, splat(-1.1514610310e-1f));
    p = fma(p, y, splat(1.1676998740e-1f));
    p = fma(p, y, splat(-1.2420140846e-1f));
    p = fma(p, y, splat(1.4249322787e-1f));
    p = fma(p, y, splat(-1.6668057665e-1f));
    p = fma(p, y, splat(2.0000714765e-1f));
    p = fma(p, y, splat(-2.4999993993e-1f));
    p = fma(p, y, splat(3.3333331174e-1f));
    p = p * y * z;
    p = fma(e, splat(-2.12194440e-4f), p);
    p = fma(z, splat(-0.5f), p);
    return fma(e, splat(0.693359375f), y + p);
}

OCTAVO_INLINE vf gumbel(uint64_t key, vu ids) {
    vu bits = uniform_bits(key, ids);
    // A 32-bit word to float with one rounding: both halves are exact.
    vf w = __builtin_convertvector((vi)(bits >> 16), vf) * 65536.0f + __builtin_convertvector((vi)(bits & 0xffff), vf);
    w = vmin(splat(0x1.fffffep-1f), vmax(splat(0x1p-33f), w * 0x1p-32f));
    vf e = -vlog1p_parts(1.0f - w, -w);
    return -vlog1p_parts(e, e - 1.0f);
}

// The first index of the largest value; NaN and -inf never win.
struct Best {
    vf value = splat(-INFINITY);
    vi id = vi{};

    OCTAVO_INLINE void offer(vf x, vi ids) {
        vi better = x > value;
        value = better ? x : value;
        id = better ? ids : id;
    }
    int64_t winner() const {
        int best = 0;
        for (int i = 1; i < VL; ++i)
            if (value[i] > value[best] || (value[i] == value[best] && id[i] < id[best])) best = i;
        return value[best] > -INFINITY ? id[best] : 0;
    }
    float largest() const {
        float best = value[0];
        for (int i = 1; i < VL; ++i) best = std::max(best, value[i]);
        return best;
    }
};

int64_t argmax_row(const float* row, int64_t size) {
    Best best;
    vi ids = lane_ids();
    for (int64_t i = 0; i < size; i += VL, ids += VL) best.offer(load_or(row + i, size - i, -INFINITY), ids);
    return best.winner();
}

int64_t sample_row(const float* row, int64_t size, float temperature, uint64_t key) {
    Best best;
    vi ids = lane_ids();
    vf bar = splat(-INFINITY);  // a score that even the largest noise does not lift above it cannot win
    for (int64_t i = 0; i < size; i += VL, ids += VL) {
        vf x = load_or(row + i, size - i, -INFINITY) / temperature;
        if (any(x + MAX_NOISE > bar)) best.offer(x + gumbel(key, (vu)ids), ids);
        if (i % (16 * VL) == 0) bar = splat(best.largest());
    }
    return best.winner();
}

// ---- log-probabilities -------------------------------------------------------------------------------------------

float max_row(const float* row, int64_t size) {
    vf best[4];
    for (vf& b : best) b = splat(-INFINITY);
    int64_t i = 0;
    for (; i + 4 * VL <= size; i += 4 * VL)
        for (int j = 0; j < 4; ++j) {
            vf x = load(row + i + j * VL);
            best[j] = x > best[j] ? x : best[j];
        }
    for (; i < size; i += VL) {
        vf x = load_or(row + i, size - i, -INFINITY);
        best[0] = x > best[0] ? x : best[0];
    }
    float largest = -INFINITY;
    for (vf& b : best)
        for (int j = 0; j < VL; ++j) largest = std::max(largest, float(b[j]));
    return largest;
}

OCTAVO_INLINE vf exp_below(vf x) { return x < SMALLEST ? vf{} : vexp(vmax(splat(SMALLEST), x)); }

// What e^x is taken relative to: the largest value where that is finite.
inline float shift_of(float largest) { return std::isfinite(largest) ? largest : 0.0f; }

// Sum of e^(x - shift): two groups of 16 lanes over alternating sixteens, then the fixed tree.
float sum_exp_row(const float* row, int64_t size, float shift) {
    lanes16 sums[2] = {lanes16::splat(0.0f), lanes16::splat(0.0f)};
    for (int64_t i = 0; i < size; i += 32)
        for (int j = 0; j < 2; ++j)
            for (int v = 0; v < lanes16::NV; ++v) {
                int64_t at = i + j * 16 + v * VL;
                if (at < size) sums[j].v[v] += exp_below(load_or(row + at, size - at, -INFINITY) - shift);
            }
    for (int v = 0; v < lanes16::NV; ++v) sums[0].v[v] += sums[1].v[v];
    return reduce_add(sums[0]);
}

int64_t count_above(const float* row, int64_t size, float bar) {
    vi count = vi{};
    int64_t i = 0;
    for (; i + VL <= size; i += VL) count -= load(row + i) > bar;
    int64_t total = 0;
    for (; i < size; ++i) total += row[i] > bar;
    for (int j = 0; j < VL; ++j) total += count[j];
    return total;
}

struct Entry {
    float value;
    int32_t id;
};
inline bool before(const Entry& a, const Entry& b) { return a.value > b.value || (a.value == b.value && a.id < b.id); }

// The k first entries of a row in (value descending, id ascending) order; NaN counts as -inf.
void top_row(const float* row, int64_t size, int64_t k, Entry* top) {
    int64_t held = 0;
    auto offer = [&](int64_t id) {
        Entry entry = {row[id] == row[id] ? row[id] : -INFINITY, int32_t(id)};
        if (held == k && !before(entry, top[k - 1])) return;
        int64_t at = held < k ? held++ : k - 1;
        for (; at > 0 && before(entry, top[at - 1]); --at) top[at] = top[at - 1];
        top[at] = entry;
    };
    int64_t i = 0;
    for (; i < k; ++i) offer(i);
    for (; i + VL <= size; i += VL)
        if (any(load(row + i) > top[k - 1].value))
            for (int j = 0; j < VL; ++j) offer(i + j);
    for (; i < size; ++i) offer(i);
}

// ---- masks -------------------------------------------------------------------------------------------------------

constexpr int BINS = 2048;
constexpr float BINS_PER_UNIT = 64.0f;
constexpr float WEIGHT_ONE = 0x1p40f;  // top-p counts probability in integers: their sums have no order

// Distance below the row's maximum as a bin number: never falls as values fall. NaN and -inf go to the last bin.
OCTAVO_INLINE int bin_of(float x, float largest) {
    float distance = (largest - x) * BINS_PER_UNIT;
    return distance < BINS - 1 ? int(distance) : BINS - 1;
}
inline int64_t weight_of(float x, float largest) {
    float d = x - largest;
    return d >= SMALLEST ? int64_t(vexp(d) * WEIGHT_ONE) : 0;
}

// Masks every entry that has at least `target` of weight before it in (value descending, id ascending) order.
// `weight(x)` per entry, `bins` the sums of weight per bin.
template <class Weight>
void keep_prefix(float* row, int64_t size, float largest, const int64_t* bins, int64_t target, const Weight& weight) {
    int crossing = 0;
    int64_t sum = 0;
    while (crossing < BINS - 1 && sum + bins[crossing] < target) sum += bins[crossing++];
    std::vector<Entry> entries;
    for (int64_t i = 0; i < size; ++i)
        if (bin_of(row[i], largest) == crossing) entries.push_back({row[i] == row[i] ? row[i] : -INFINITY, int32_t(i)});
    std::sort(entries.begin(), entries.end(), before);
    Entry last = {INFINITY, -1};  // the last entry kept
    for (const Entry& entry : entries) {
        if (sum >= target) break;
        sum += weight(entry.value);
        last = entry;
    }
    for (int64_t i = 0; i < size; ++i) {
        int bin = bin_of(row[i], largest);
        if (bin > crossing || (bin == crossing && before(last, {row[i], int32_t(i)}))) row[i] = -INFINITY;
    }
}

void mask_row(float* row, int64_t size, int64_t k, float p, float min_p) {
    float largest = max_row(row, size);
    if (!std::isfinite(largest)) return;
    if (min_p > 0) {
        vf bar = splat(largest + std::log(min_p)), hidden = splat(-INFINITY);
        for (int64_t i = 0; i < size; i += VL) {
            vf x = load_or(row + i, size - i, 0.0f);
            x = x < bar ? hidden : x;
            if (size - i >= VL) store(row + i, x);
            else store_first(row + i, x, size - i);
        }
    }
    int64_t bins[BINS];
    if (k > 0 && k < size) {
        std::fill(bins, bins + BINS, 0);
        for (int64_t i = 0; i < size; ++i) ++bins[bin_of(row[i], largest)];
        keep_prefix(row, size, largest, bins, k, [](float) { return int64_t(1); });
    }
    if (p < 1) {
        std::fill(bins, bins + BINS, 0);
        int64_t total = 0;
        for (int64_t i = 0; i < size; i += VL) {
            float x[VL], e[VL];
            vf v = load_or(row + i, size - i, -INFINITY);
            store(x, v);
            store(e, exp_below(v - largest));
            for (int j = 0; j < VL; ++j) {
                int64_t weight = x[j] > -INFINITY ? int64_t(e[j] * WEIGHT_ONE) : 0;
                bins[bin_of(x[j], largest)] += weight;
                total += weight;
            }
        }
        int64_t target = std::max(int64_t(std::ceil(double(p) * double(total))), int64_t(1));
        keep_prefix(row, size, largest, bins, target, [&](float x) { return weight_of(x, largest); });
    }
}

}  // namespace
}  // namespace octavo

using octavo::Rows;

OCTAVO_API void octavo_sample_rows(float* logits, int64_t stride, int64_t count, int64_t vocab_size,
                                   const float* temperatures, const uint64_t* seeds, const uint64_t* positions,
                                   int64_t* tokens) {
    Rows rows = {logits, stride, count, vocab_size};
    rows.each([&](int64_t r) {
        uint64_t key = octavo::mix64(octavo::mix64(seeds[r] + octavo::GOLDEN) + positions[r] * octavo::GOLDEN);
        tokens[r] = temperatures[r] == 0 ? octavo::argmax_row(rows.at(r), vocab_size)
                                         : octavo::sample_row(rows.at(r), vocab_size, temperatures[r], key);
    });
}

OCTAVO_API void octavo_logprob_stats(float* logits, int64_t stride, int64_t count, int64_t vocab_size, float* largest,
                                     float* log_sum_exp) {
    Rows rows = {logits, stride, count, vocab_size};
    rows.each([&](int64_t r) {
        largest[r] = octavo::max_row(rows.at(r), vocab_size);
        float shift = octavo::shift_of(largest[r]);
        log_sum_exp[r] = shift + std::log(octavo::sum_exp_row(rows.at(r), vocab_size, shift));
    });
}

OCTAVO_API void octavo_token_logprobs(float* logits, int64_t stride, int64_t count, int64_t vocab_size,
                                      const int64_t* token_ids, float* logprobs, int64_t* ranks) {
    Rows rows = {logits, stride, count, vocab_size};
    rows.each([&](int64_t r) {
        const float* row = rows.at(r);
        float chosen = row[token_ids[r]], shift = octavo::shift_of(octavo::max_row(row, vocab_size));
        logprobs[r] = (chosen - shift) - std::log(octavo::sum_exp_row(row, vocab_size, shift));
        ranks[r] = 1 + octavo::count_above(row, vocab_size, chosen);
    });
}

OCTAVO_API void octavo_top_logprobs(float* logits, int64_t stride, int64_t count, int64_t vocab_size, int64_t k,
                                    int64_t* token_ids, float* logprobs) {
    Rows rows = {logits, stride, count, vocab_size};
    rows.each([&](int64_t r) {
        static thread_local octavo::Scratch scratch;
        auto* top = static_cast<octavo::Entry*>(scratch.bytes(k * sizeof(octavo::Entry)));
        const float* row = rows.at(r);
        octavo::top_row(row, vocab_size, k, top);
        float shift = octavo::shift_of(top[0].value);
        float log_sum = std::log(octavo::sum_exp_row(row, vocab_size, shift));
        for (int64_t i = 0; i < k; ++i) {
            token_ids[r * k + i] = top[i].id;
            logprobs[r * k + i] = (row[top[i].id] - shift) - log_sum;
        }
    });
}

OCTAVO_API void octavo_nan_rows(float* logits, int64_t stride, int64_t count, int64_t vocab_size, uint8_t* found) {
    Rows rows = {logits, stride, count, vocab_size};
    rows.each([&](int64_t r) {
        octavo::vi nan = octavo::vi{};
        for (int64_t i = 0; i < vocab_size; i += octavo::VL) {
            octavo::vf x = octavo::load_or(rows.at(r) + i, vocab_size - i, 0.0f);
            nan |= x != x;
        }
        found[r] = octavo::any(nan);
    });
}

OCTAVO_API void octavo_top_k_top_p_mask(float* logits, int64_t stride, int64_t count, int64_t vocab_size,
                                        const int64_t* top_k, const float* top_p, const float* min_p) {
    Rows rows = {logits, stride, count, vocab_size};
    rows.each([&](int64_t r) { octavo::mask_row(rows.at(r), vocab_size, top_k[r], top_p[r], min_p[r]); });
}
