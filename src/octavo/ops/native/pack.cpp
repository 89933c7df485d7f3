// Packs a weight [N, K] into panels (panels.h), quantizing to int8 on the way where asked.
//
// What is not quantized is a transposition of 4-byte words, float32 values or pairs of bfloat16; the layout of single
// bfloat16 is made of the transposed pairs. So packing runs at the pace of memory.
#include <atomic>
#include <cmath>

#include "include/panels.h"
#include "include/transpose.h"

namespace octavo {

struct Source {
    const void* data;
    int64_t stride;  // elements
    int32_t dtype;
    int64_t n, k;
};

// `count` values of row `n` from `k` on as float32, zero beyond the weight's rows and columns.
static void read_row(const Source& source, int64_t n, int64_t k, int64_t count, float* out) {
    for (int64_t i = 0; i < count; ++i) {
        const int64_t at = n * source.stride + k + i;
        if (n >= source.n || k + i >= source.k) out[i] = 0.0f;
        else if (source.dtype == F32) out[i] = static_cast<const float*>(source.data)[at];
        else out[i] = to_float(static_cast<const bf16*>(source.data)[at]);
    }
}

// Where channel `lane` of 32 sits in a row of bfloat16 words.
static OCTAVO_INLINE int word_place(int lane) { return 2 * (lane % 16) + lane / 16; }

// One scale and 32 quants: symmetric, the scale rounded to bfloat16 first (matmul.py: _quantize is the twin).
static bf16 quantize(const float* values, int8_t* quants, int64_t quant_stride) {
    float largest = 0.0f;
    for (int i = 0; i < QGROUP; ++i) largest = std::fmax(largest, std::fabs(values[i]));
    const bf16 scale = to_bf16(largest / 127.0f);
    const float divisor = to_float(scale);
    for (int i = 0; i < QGROUP; ++i) {
        float q = divisor > 0.0f ? std::nearbyint(values[i] / divisor) : 0.0f;
        quants[i * quant_stride] = int8_t(q > 127.0f ? 127.0f : (q < -127.0f ? -127.0f : q));
    }
    return scale;
}

static void quantize_panel(const Source& source, int64_t panel, char* out) {
    for (int64_t k = 0; k < source.k; k += QGROUP) {
        char* group = out + k / QGROUP * Int8Panel::GROUP_BYTES;
        for (int lane = 0; lane < NR; ++lane) {
            float values[QGROUP];
            read_row(source, panel * NR + lane, k, QGROUP, values);
            auto* quants = reinterpret_cast<int8_t*>(group + Int8Panel::SCALE_BYTES) + lane;
            reinterpret_cast<bf16*>(group)[word_place(lane)] = quantize(values, quants, NR);
        }
    }
}

constexpr int STEPS = LINE_WORDS;  // words of a row that are transposed together

using Words = uint32_t[STEPS][NR];

// Words [first, first + STEPS) of the 32 rows of a panel, transposed; zero beyond the weight's rows and columns. The
// next panel's are asked for meanwhile: rows lie apart, and hardware foresees few streams.
static void transpose(const Source& source, int64_t panel, int64_t first, Words& out) {
    const int64_t size = source.dtype == F32 ? 4 : 2, stride = source.stride * size, last = source.k * size;
    const char* row = static_cast<const char*>(source.data) + panel * NR * stride + 4 * first;
    for (int half = 0; half < NR; half += LINE_WORDS) {
        Line lines[LINE_WORDS];
        for (int lane = 0; lane < LINE_WORDS; ++lane, row += stride) {
            lines[lane] = read_line(row, panel * NR + half + lane < source.n ? last - 4 * first : 0);
            __builtin_prefetch(row + NR * stride, 0, 2);
        }
        transpose_lines(lines, reinterpret_cast<char*>(&out[0][half]), sizeof(out[0]));
    }
}

// A row of pairs -> two rows of single bfloat16, in its place.
static void split_pairs(uint32_t (&row)[NR]) {
    uint32_t single[2][NR / 2];
    for (int i = 0; i < NR / 2; ++i) {
        single[0][i] = (row[i] & 0xffffu) | row[i + NR / 2] << 16;
        single[1][i] = row[i] >> 16 | (row[i + NR / 2] & 0xffff0000u);
    }
    std::memcpy(row, single, sizeof(row));
}

static void transpose_panel(const Source& source, int32_t kind, int64_t panel, char* out) {
    const int64_t rows = source.dtype == F32 ? source.k : (source.k + 1) / 2;  // of words
    const bool starts_line = reinterpret_cast<uintptr_t>(out) % 64 == 0;
    for (int64_t first = 0; first < rows; first += STEPS) {
        alignas(64) Words words;
        transpose(source, panel, first, words);
        const int64_t count = first + STEPS < rows ? STEPS : rows - first;
        char* to = out + first * sizeof(words[0]);
        int64_t bytes = count * sizeof(words[0]);
        if (kind == KIND_BF16) {
            for (int64_t i = 0; i < count; ++i) split_pairs(words[i]);
            if (2 * (first + count) > source.k) bytes -= sizeof(words[0]) / 2;  // an odd number has no last k
        }
        if (starts_line) stream_lines(to, reinterpret_cast<char*>(words), bytes);
        else std::memcpy(to, words, bytes);
    }
    end_streams();
}

template <class Bits>
static bool all_finite(const Bits* bits, int64_t first, int64_t last, Bits exponent) {
    Bits found = 0;
    for (int64_t i = first; i < last; ++i) found |= Bits((bits[i] & exponent) == exponent);
    return found == 0;
}

}  // namespace octavo

// Bytes of one panel of a weight of this kind.
OCTAVO_API int64_t octavo_panel_bytes(int32_t kind, int64_t k) {
    using namespace octavo;
    if (kind == KIND_INT8) return Int8Panel::panel_bytes(k);
    if (kind == KIND_PAIRS) return PairPanel::panel_bytes((k + 1) / 2);
    return kind == KIND_BF16 ? Bf16Panel::panel_bytes(k) : F32Panel::panel_bytes(k);
}

// weight [n, k] of `dtype` with its row stride in elements -> out: ceil(n / 32) panels. Kinds but int8 take their own
// dtype only.
OCTAVO_API void octavo_pack(const void* weight, int64_t stride, int32_t dtype, int64_t n, int64_t k, int32_t kind,
                            void* out) {
    using namespace octavo;
    const Source source{weight, stride, dtype, n, k};
    const int64_t panels = (n + NR - 1) / NR, bytes = octavo_panel_bytes(kind, k);
    parallel_tasks(threads_for(n * k, 65536), panels, [&](int64_t panel) {
        char* to = static_cast<char*>(out) + panel * bytes;
        if (kind == KIND_INT8) quantize_panel(source, panel, to);
        else transpose_panel(source, kind, panel, to);
    });
}

// Whether none of `count` floats of `size` bytes, 2 or 4, has all of its exponent's bits, which are those of `exponent`:
// NaN and infinities have.
OCTAVO_API int32_t octavo_all_finite(const void* data, int64_t count, int64_t size, uint32_t exponent) {
    using namespace octavo;
    constexpr int64_t PART = 1 << 18;
    std::atomic<int32_t> finite{1};
    const int64_t parts = (count + PART - 1) / PART;
    parallel_tasks(threads_for(count, PART), parts, [&](int64_t part) {
        const int64_t first = part * PART, last = first + PART < count ? first + PART : count;
        const bool own = size == 2 ? all_finite(static_cast<const uint16_t*>(data), first, last, uint16_t(exponent))
                                   : all_finite(static_cast<const uint32_t*>(data), first, last, exponent);
        if (!own) finite.store(0, std::memory_order_relaxed);
    });
    return finite.load();
}
