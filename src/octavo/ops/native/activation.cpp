// Gated products: out[t, i] = act(gate[t, i]) * up[t, i] in float32, rounded once.
//
// Element by element and without fused multiply-adds, so neither the place of an element nor the vector width shows,
// and gated_activation_reference has the same bits.
#include "include/operators.h"

namespace octavo {

struct Silu {
    static OCTAVO_INLINE vf apply(vf g) { return g / (vexp(-g) + 1.0f); }
};

struct Sigmoid {
    static OCTAVO_INLINE vf apply(vf g) { return 1.0f / (vexp(-g) + 1.0f); }
};

// 0.5 g (1 + tanh z) = g / (1 + exp(-2 z)), z = sqrt(2/pi) (g + 0.044715 g^3): no cancellation for negative g.
struct GeluTanh {
    static OCTAVO_INLINE vf apply(vf g) {
        vf z = g * (g * g * 0.044715f + 1.0f) * -1.5957691216057308f;
        return g / (vexp(z) + 1.0f);
    }
};

template <class Act, class T>
static void gated_rows(const void* gate_, int64_t gate_stride, const void* up_, int64_t up_stride, void* out_,
                       int64_t rows, int64_t n) {
    const int64_t whole = n / VL * VL, rest = n - whole;
    parallel_ranges(threads_for(rows * n, 16384), rows, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            const T *gate = static_cast<const T*>(gate_) + t * gate_stride, *up = static_cast<const T*>(up_) + t * up_stride;
            T* row = static_cast<T*>(out_) + t * n;
            for (int64_t i = 0; i < whole; i += VL) store(row + i, Act::apply(load(gate + i)) * load(up + i));
            if (rest) {
                vf y = Act::apply(load_first(gate + whole, rest)) * load_first(up + whole, rest);
                store_first(row + whole, y, rest);
            }
        }
    });
}

}  // namespace octavo

// gate and up [rows, n] with their row strides in elements; out [rows, n] contiguous, which may be `up`. kind: 0 silu,
// 1 gelu_tanh, 2 sigmoid.
OCTAVO_API void octavo_gated_product(const void* gate, int64_t gate_stride, const void* up, int64_t up_stride,
                                     void* out, int64_t rows, int64_t n, int32_t kind, int32_t dtype) {
    using namespace octavo;
    if (kind == 0) {
        (dtype == F32 ? gated_rows<Silu, float> : gated_rows<Silu, bf16>)(gate, gate_stride, up, up_stride, out, rows, n);
    } else if (kind == 1) {
        (dtype == F32 ? gated_rows<GeluTanh, float> : gated_rows<GeluTanh, bf16>)(gate, gate_stride, up, up_stride, out,
                                                                                  rows, n);
    } else {
        (dtype == F32 ? gated_rows<Sigmoid, float> : gated_rows<Sigmoid, bf16>)(gate, gate_stride, up, up_stride, out,
                                                                                rows, n);
    }
}

// The same of gate_up [rows, 2n]: gate, then up.
OCTAVO_API void octavo_gated_activation(const void* gate_up, int64_t stride, void* out, int64_t rows, int64_t n,
                                        int32_t kind, int32_t dtype) {
    const int64_t item = dtype == octavo::F32 ? 4 : 2;
    octavo_gated_product(gate_up, stride, static_cast<const char*>(gate_up) + n * item, stride, out, rows, n, kind,
                         dtype);
}
