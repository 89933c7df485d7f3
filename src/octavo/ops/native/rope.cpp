// One pass per token over the qkv projection: q/k RMS norm, rotation, store of K and V (octavo/ops/rope/__init__.py).
//
// A head is worked on alone, in float32: norm (sum of squares in the fixed 16-lane tree), one rounding to the dtype,
// rotation without fused multiply-add, one rounding. A token's result does not depend on its neighbours.
#include <algorithm>
#include <cmath>

#include "include/operators.h"

namespace octavo {
namespace {

constexpr int64_t GRAIN = 1 << 15;  // channels worth a thread

struct RopeCall {
    const void* qkv;
    const int64_t* positions;
    const float *cos_sin, *q_norm, *k_norm;  // norms may be null
    void *kv, *q_out;
    const int64_t* slots;
    int64_t num_tokens, qkv_token, kv_block, kv_head, kv_token;  // strides in elements
    int64_t num_heads, num_kv_heads, head_size, rotary_size, block_size;
    float eps, q_scale;
    const float *key_scale, *value_scale;  // [kv heads] or null: what the cache's elements stand for
};

// Channel vectors of a buffer; the last one may be short. Buffers have VL - 1 spare floats.
template <class T>
OCTAVO_INLINE vf load_upto(const T* p, int64_t left) {
    return left >= VL ? load(p) : load_first(p, left);
}
template <class T>
OCTAVO_INLINE void store_upto(T* p, vf v, int64_t left) {
    if (left >= VL) store(p, v);
    else store_first(p, v, left);
}

// RMS norm of `size` channels in place, each rounded once to T.
template <class T>
void norm_head(float* x, const float* weight, int64_t size, float eps) {
    lanes16 squares = lanes16::splat(0.0f);
    for (int64_t c = 0; c < size; c += 16)
        for (int i = 0; i < lanes16::NV; ++i) {
            vf v = load_upto(x + c + i * VL, std::max(size - c - i * VL, int64_t(0)));
            squares.v[i] = fma(v, v, squares.v[i]);
        }
    float scale = 1.0f / std::sqrt(reduce_add(squares) / float(size) + eps);
    for (int64_t c = 0; c < size; c += VL) {
        vf y = (load_upto(x + c, size - c) * scale) * load_upto(weight + c, size - c);
        T rounded[VL];
        store(rounded, y);
        store_upto(x + c, load(rounded), size - c);
    }
}

// Norm and rotate one head of `in` into `out`.
template <class T>
void turn_head(const RopeCall& call, const T* in, const float* norm, const float* cos_sin, float scale, T* out, float* x) {
    int64_t size = call.head_size, half = call.rotary_size / 2;
    for (int64_t c = 0; c < size; c += VL) store_upto(x + c, load_upto(in + c, size - c), size - c);
    if (norm != nullptr) norm_head<T>(x, norm, size, call.eps);
    for (int64_t c = 0; c < half; c += VL) {
        int64_t left = half - c;
        vf cosine = load_upto(cos_sin + c, left), sine = load_upto(cos_sin + half + c, left);
        vf first = load_upto(x + c, left), second = load_upto(x + half + c, left);
        store_upto(out + c, (first * cosine - second * sine) * scale, left);
        store_upto(out + half + c, (second * cosine + first * sine) * scale, left);
    }
    for (int64_t c = 2 * half; c < size; c += VL) store_upto(out + c, load_upto(x + c, size - c) * scale, size - c);
}

// One head in the cache: as it is, or divided by the scale and rounded to the cache's type.
template <class T>
void store_head(const T* in, const float*, int64_t, T* out, int64_t size) {
    std::memcpy(out, in, size * sizeof(T));
}
template <class T, class K>
void store_head(const T* in, const float* scales, int64_t head, K* out, int64_t size) {
    vf scale = splat(scales == nullptr ? 1.0f : scales[head]);
    for (int64_t c = 0; c < size; c += VL) store_upto(out + c, load_upto(in + c, size - c) / scale, size - c);
}

template <class T, class K>
void one_token(const RopeCall& call, int64_t token, float* buffer) {
    int64_t size = call.head_size;
    const T* in = static_cast<const T*>(call.qkv) + token * call.qkv_token;
    const float* cos_sin = call.cos_sin + call.positions[token] * call.rotary_size;
    T* q = static_cast<T*>(call.q_out) + token * call.num_heads * size;
    for (int64_t h = 0; h < call.num_heads; ++h, in += size, q += size)
        turn_head(call, in, call.q_norm, cos_sin, call.q_scale, q, buffer);
    int64_t slot = call.slots[token];
    if (slot < 0) return;
    T* turned = reinterpret_cast<T*>(buffer + size + VL);
    K* kv = static_cast<K*>(call.kv) + slot / call.block_size * call.kv_block + slot % call.block_size * call.kv_token;
    const T* values = in + call.num_kv_heads * size;
    for (int64_t h = 0; h < call.num_kv_heads; ++h, in += size, values += size, kv += call.kv_head) {
        turn_head(call, in, call.k_norm, cos_sin, 1.0f, turned, buffer);
        store_head(turned, call.key_scale, h, kv, size);
        store_head(values, call.value_scale, h, kv + size, size);
    }
}

template <class T, class K>
void all_tokens(const RopeCall& call) {
    int64_t width = (call.num_heads + 2 * call.num_kv_heads) * call.head_size;
    int threads = threads_for(call.num_tokens * width, GRAIN);
    parallel_ranges(threads, call.num_tokens, [&](int64_t begin, int64_t end) {
        static thread_local Scratch scratch;
        float* buffer = scratch.floats(2 * (call.head_size + VL));
        for (int64_t token = begin; token < end; ++token) one_token<T, K>(call, token, buffer);
    });
}

template <class T>
void store_as(const RopeCall& call, int32_t kv_dtype) {
    if (kv_dtype == FP8) all_tokens<T, fp8>(call);
    else if (kv_dtype == INT8) all_tokens<T, int8_t>(call);
    else if (kv_dtype == BF16) all_tokens<T, bf16>(call);
    else all_tokens<T, T>(call);
}

}  // namespace
}  // namespace octavo

OCTAVO_API void octavo_qk_norm_rope_store(
    const void* qkv, const int64_t* positions, const float* cos_sin, const float* q_norm, const float* k_norm, void* kv,
    void* q_out, const int64_t* slots, int64_t num_tokens, int64_t qkv_token, int64_t kv_block, int64_t kv_head,
    int64_t kv_token, int64_t num_heads, int64_t num_kv_heads, int64_t head_size, int64_t rotary_size,
    int64_t block_size, float eps, float q_scale, const float* key_scale, const float* value_scale, int32_t kv_dtype,
    int32_t dtype) {
    octavo::RopeCall call = {qkv,       positions, cos_sin,  q_norm,   k_norm,    kv,           q_out,     slots,
                         num_tokens, qkv_token, kv_block, kv_head,  kv_token,  num_heads,    num_kv_heads, head_size,
                         rotary_size, block_size, eps,    q_scale,  key_scale, value_scale};
    if (dtype == octavo::F32) octavo::store_as<float>(call, kv_dtype);
    else octavo::store_as<octavo::bf16>(call, kv_dtype);
}
