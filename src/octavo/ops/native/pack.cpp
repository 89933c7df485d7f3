// Packs a weight [N, K] into panels (panels.h), quantizing to int8 on the way where asked.
#include <cmath>

#include "include/panels.h"

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

static void pack_panel(const Source& source, int32_t kind, int64_t panel, char* out) {
    for (int64_t k = 0; k < source.k; k += QGROUP) {
        const int64_t count = k + QGROUP < source.k ? QGROUP : source.k - k;
        char* group = out + k / QGROUP * Int8Panel::GROUP_BYTES;
        for (int lane = 0; lane < NR; ++lane) {
            float values[QGROUP];
            read_row(source, panel * NR + lane, k, QGROUP, values);
            if (kind == KIND_INT8) {
                auto* quants = reinterpret_cast<int8_t*>(group + Int8Panel::SCALE_BYTES) + lane;
                reinterpret_cast<bf16*>(group)[word_place(lane)] = quantize(values, quants, NR);
            } else if (kind == KIND_BF16) {
                bf16* words = reinterpret_cast<bf16*>(out) + k * NR + word_place(lane);
                for (int64_t i = 0; i < count; ++i) words[i * NR] = to_bf16(values[i]);
            } else {
                float* row = reinterpret_cast<float*>(out) + k * NR + lane;
                for (int64_t i = 0; i < count; ++i) row[i * NR] = values[i];
            }
        }
    }
}

}  // namespace octavo

// Bytes of one panel of a weight of this kind.
OCTAVO_API int64_t octavo_panel_bytes(int32_t kind, int64_t k) {
    using namespace octavo;
    if (kind == KIND_INT8) return Int8Panel::panel_bytes(k);
    return kind == KIND_BF16 ? Bf16Panel::panel_bytes(k) : F32Panel::panel_bytes(k);
}

// weight [n, k] of `dtype` with its row stride in elements -> out: ceil(n / 32) panels.
OCTAVO_API void octavo_pack(const void* weight, int64_t stride, int32_t dtype, int64_t n, int64_t k, int32_t kind,
                            void* out) {
    using namespace octavo;
    const Source source{weight, stride, dtype, n, k};
    const int64_t panels = (n + NR - 1) / NR, bytes = octavo_panel_bytes(kind, k);
    parallel_tasks(threads_for(n * k, 65536), panels, [&](int64_t panel) {
        pack_panel(source, kind, panel, static_cast<char*>(out) + panel * bytes);
    });
}
