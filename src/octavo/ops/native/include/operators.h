// The operators' C functions that other operators are made of, and the packed weight that they share.
// Invariant: what a function computes is told in its own file; this header only repeats its signature.
#pragma once

#include "vec.h"

namespace octavo {

// A packed weight [n, k] (panels.h); octavo.ops.gemm._WeightHeader.
struct Weight {
    int64_t n, k;
    int64_t panel_bytes;
    const char* data;
    int32_t kind;
};

// What most layers' attention has not; octavo.ops.attention._Extras. Pointers may be null.
struct AttentionExtras {
    int64_t chunk;                // 0: none
    const float *alibi, *sinks;   // [heads]
    const float *key_scale, *value_scale;  // [kv heads]
    int32_t causal, kv_dtype;
    int32_t in_pairs;  // bfloat16 over bfloat16 (attention_pairs.h)
};

struct DeltaNet;   // delta_net.cpp
struct StateStep;  // kept.h

}  // namespace octavo

OCTAVO_API void octavo_linear(const void* x, int64_t x_stride, int64_t m, const octavo::Weight* weight,
                              const float* bias, void* out, int64_t out_stride, int32_t x_dtype, int32_t out_dtype);

OCTAVO_API void octavo_rms_norm(const void* x, int64_t x_stride, const void* residual, int64_t residual_stride,
                                const float* weight, void* out, void* sum_out, int64_t rows, int64_t n, float eps,
                                int32_t dtype);

OCTAVO_API void octavo_gated_product(const void* gate, int64_t gate_stride, const void* up, int64_t up_stride,
                                     void* out, int64_t rows, int64_t n, int32_t kind, int32_t dtype);

OCTAVO_API void octavo_gated_activation(const void* gate_up, int64_t stride, void* out, int64_t rows, int64_t n,
                                        int32_t kind, int32_t dtype);

OCTAVO_API void octavo_qk_norm_rope_store(
    const void* qkv, const int64_t* positions, const float* cos_sin, const float* q_norm, const float* k_norm, void* kv,
    void* q_out, const int64_t* slots, int64_t num_tokens, int64_t qkv_token, int64_t kv_block, int64_t kv_head,
    int64_t kv_token, int64_t num_heads, int64_t num_kv_heads, int64_t head_size, int64_t rotary_size,
    int64_t block_size, float eps, float q_scale, const float* key_scale, const float* value_scale, int32_t kv_dtype,
    int32_t dtype);

OCTAVO_API void octavo_paged_attention(
    const void* q, void* out, const void* kv, const int32_t* query_start, const int32_t* seq_lens,
    const int32_t* block_table, int64_t q_token, int64_t q_head, int64_t out_token, int64_t out_head, int64_t kv_block,
    int64_t kv_head, int64_t kv_token, int64_t table_row, int64_t num_rows, int64_t num_heads, int64_t num_kv_heads,
    int64_t head_size, int64_t block_size, int64_t window, int64_t value_size, float scale, float soft_cap,
    const octavo::AttentionExtras* extras, int32_t dtype);

OCTAVO_API void octavo_delta_net(const octavo::StateStep* step, const octavo::DeltaNet* net, const void* x,
                                 int64_t x_stride, int64_t tokens, void* out, int32_t dtype);
