// A decoder's layers without a return to the caller between operators (octavo/ops/decoder.py).
//
// Every stage is the operator's own C function on buffers that stay from call to call, so the bits are those of the
// separate operators. Buffers belong to the calling thread. Norms and activations may run in place: each reads an
// element, or a whole row, before it writes there.
#include <algorithm>
#include <cstring>

#include "include/operators.h"

namespace octavo {
namespace {

struct DecoderLayer {  // octavo.ops.decoder._LayerHeader
    const float *input_norm, *attention_norm, *mlp_norm, *mlp_out_norm;  // the second and the fourth may be null
    const Weight *qkv, *output, *gate_up, *down;                         // the last two are null: another kind of MLP
    const DeltaNet* net;                                                 // in the place of attention, or null
    const float *qkv_bias, *output_bias, *q_norm, *k_norm, *cos_sin;     // all but the last may be null
    int64_t num_heads, num_kv_heads, head_size, rotary_size, window;
    float eps, head_eps, scale, soft_cap;
    int32_t activation, in_pairs, gated;  // the latter two: of attention, whose gates are the last channels of qkv
};

struct LayerCache {  // octavo.ops.decoder._CacheHeader: [blocks, kv_heads, block_size, 2 * head_size], strides in elements
    void* kv;
    int64_t block, head, token, block_size;
    int64_t group;
};

struct GroupRows {  // octavo.ops.decoder._RowsHeader: what octavo_paged_attention and the store ask of a cache group
    const int32_t *query_start, *seq_lens, *block_table;
    const int64_t* slots;
    int64_t num_rows, table_row;
};

struct Tokens {
    const int64_t* positions;
    int64_t count;
    int32_t dtype;
};

// Rows of the hidden state. `stride` in elements.
struct Rows {
    const void* data;
    int64_t stride;
};

void multiply(const Tokens& tokens, const void* x, const Weight* weight, const float* bias, void* out) {
    octavo_linear(x, weight->k, tokens.count, weight, bias, out, weight->n, tokens.dtype, tokens.dtype);
}

void norm_in_place(const Tokens& tokens, void* x, const float* weight, int64_t size, float eps) {
    octavo_rms_norm(x, size, nullptr, 0, weight, x, nullptr, tokens.count, size, eps, tokens.dtype);
}

// A buffer of `width` elements per token that stays with the thread.
void* buffer(Scratch& scratch, const Tokens& tokens, int64_t width) {
    return scratch.bytes(tokens.count * width * (tokens.dtype == F32 ? 4 : 2));
}

// The norm of what the layer before left, in a buffer that stays until the next call.
const void* norm_input(const DecoderLayer& layer, const Tokens& tokens, Rows x, Rows residual, void* residual_out) {
    static thread_local Scratch scratch;
    void* normed = buffer(scratch, tokens, layer.output->n);
    octavo_rms_norm(x.data, x.stride, residual.data, residual.stride, layer.input_norm, normed, residual_out,
                    tokens.count, layer.output->n, layer.eps, tokens.dtype);
    return normed;
}

// Gives the projections, which stay until the next call.
const void* pre_attention(const DecoderLayer& layer, const LayerCache& cache, const int64_t* slots,
                          const Tokens& tokens, Rows x, Rows residual, void* residual_out, void* q_out) {
    static thread_local Scratch scratch;
    const void* normed = norm_input(layer, tokens, x, residual, residual_out);
    void* qkv = buffer(scratch, tokens, layer.qkv->n);
    multiply(tokens, normed, layer.qkv, layer.qkv_bias, qkv);
    octavo_qk_norm_rope_store(qkv, tokens.positions, layer.cos_sin, layer.q_norm, layer.k_norm, cache.kv, q_out, slots,
                              tokens.count, layer.qkv->n, cache.block, cache.head, cache.token, layer.num_heads,
                              layer.num_kv_heads, layer.head_size, layer.rotary_size, cache.block_size, layer.head_eps,
                              1.0f, nullptr, nullptr, tokens.dtype, tokens.dtype);
    return qkv;
}

void post_attention(const DecoderLayer& layer, const Tokens& tokens, const void* attended, Rows residual,
                     void* residual_out, void* out) {
    static thread_local Scratch gate_up_scratch, inner_scratch;
    const int64_t size = layer.output->n;
    multiply(tokens, attended, layer.output, layer.output_bias, out);
    if (layer.attention_norm) norm_in_place(tokens, out, layer.attention_norm, size, layer.eps);
    octavo_rms_norm(out, size, residual.data, residual.stride, layer.mlp_norm, out, residual_out, tokens.count, size,
                    layer.eps, tokens.dtype);
    if (!layer.gate_up) return;
    void* gate_up = buffer(gate_up_scratch, tokens, layer.gate_up->n);
    void* inner = buffer(inner_scratch, tokens, layer.down->k);
    multiply(tokens, out, layer.gate_up, nullptr, gate_up);
    octavo_gated_activation(gate_up, layer.gate_up->n, inner, tokens.count, layer.down->k, layer.activation,
                            tokens.dtype);
    multiply(tokens, inner, layer.down, nullptr, out);
    if (layer.mlp_out_norm) norm_in_place(tokens, out, layer.mlp_out_norm, size, layer.eps);
}

// The rows at `at` of `width` bytes each, one behind the other.
template <class T>
T* gather(Scratch& scratch, const int64_t* at, int64_t count, const T* rows, int64_t width = sizeof(T)) {
    char* out = static_cast<char*>(scratch.bytes(count * width));
    for (int64_t i = 0; i < count; ++i)
        std::memcpy(out + i * width, reinterpret_cast<const char*>(rows) + at[i] * width, width);
    return reinterpret_cast<T*>(out);
}

void attend(const DecoderLayer& layer, const LayerCache& cache, const GroupRows& rows, const Tokens& tokens,
            const void* q, void* out) {
    const int64_t token = layer.num_heads * layer.head_size;
    const AttentionExtras in_pairs{0, nullptr, nullptr, nullptr, nullptr, 1, tokens.dtype, 1};
    const AttentionExtras* extras = layer.in_pairs ? &in_pairs : nullptr;
    octavo_paged_attention(q, out, cache.kv, rows.query_start, rows.seq_lens, rows.block_table, token, layer.head_size,
                           token, layer.head_size, cache.block, cache.head, cache.token, rows.table_row, rows.num_rows,
                           layer.num_heads, layer.num_kv_heads, layer.head_size, cache.block_size, layer.window, 0,
                           layer.scale, layer.soft_cap, extras, tokens.dtype);
}

// What attention gave times the sigmoid of its gates.
void weight_by_gates(const DecoderLayer& layer, const Tokens& tokens, const void* qkv, void* attended) {
    const int64_t width = layer.num_heads * layer.head_size, item = tokens.dtype == F32 ? 4 : 2;
    const void* gates = static_cast<const char*>(qkv) + (layer.qkv->n - width) * item;
    octavo_gated_product(gates, layer.qkv->n, attended, width, attended, tokens.count, width, 2, tokens.dtype);
}

}  // namespace
}  // namespace octavo

// x [tokens, size] and residual [tokens, size] (null: x is the residual, and residual_out is not written) with row
// strides in elements -> q_out [tokens, heads * head_size], K and V in the cache, residual_out; outputs contiguous.
OCTAVO_API void octavo_enter_attention(const octavo::DecoderLayer* layer, const octavo::LayerCache* cache,
                                       const int64_t* slots, const int64_t* positions, const void* x, int64_t x_stride,
                                       const void* residual, int64_t residual_stride, void* residual_out, void* q_out,
                                       int64_t num_tokens, int32_t dtype) {
    octavo::pre_attention(*layer, *cache, slots, {positions, num_tokens, dtype}, {x, x_stride},
                            {residual, residual_stride}, residual_out, q_out);
}

// attended [tokens, heads * head_size] contiguous -> out: after the MLP, or before it where the layer names none.
OCTAVO_API void octavo_leave_attention(const octavo::DecoderLayer* layer, const void* attended, const void* residual,
                                       int64_t residual_stride, void* residual_out, void* out, int64_t num_tokens,
                                       int32_t dtype) {
    octavo::post_attention(*layer, {nullptr, num_tokens, dtype}, attended, {residual, residual_stride}, residual_out,
                            out);
}

// x [tokens, size] contiguous -> out: the norm of what the last layer leaves of all tokens, or of each row's last token
// where `last_tokens` [num_rows] says which these are; `last_start` is their query_start, `last_keys` the last layer
// without its queries, if it attends. `rows`: one per cache group; `states`: the rows as layers with states see them.
OCTAVO_API void octavo_decode(const octavo::DecoderLayer* layers, const octavo::LayerCache* caches, int64_t num_layers,
                              const octavo::GroupRows* rows, const octavo::StateStep* states, const int64_t* positions,
                              const void* x, const float* norm, float eps, void* out, int64_t num_tokens,
                              const int64_t* last_tokens, int64_t num_last, const int32_t* last_start,
                              const octavo::DecoderLayer* last_keys, int32_t dtype) {
    using namespace octavo;
    static thread_local Scratch residual_scratch, x_scratch, q_scratch, attended_scratch, last_scratch[3];
    Tokens tokens{positions, num_tokens, dtype};
    const int64_t size = layers[0].output->n, item = dtype == F32 ? 4 : 2;
    void* residual = buffer(residual_scratch, tokens, size);
    void* now = buffer(x_scratch, tokens, size);
    Rows left{x, size}, before{nullptr, 0};  // what the last layer left; the residual before it
    for (int64_t i = 0; i < num_layers; ++i) {
        const DecoderLayer& layer = layers[i];
        const bool narrows = last_tokens && i == num_layers - 1;  // of the others nobody needs more than what is kept
        void* mixed = buffer(attended_scratch, tokens, layer.output->k);
        const void* stream = before.data ? residual : left.data;  // once the norm has added what the last layer left
        if (layer.net) {
            const void* normed = norm_input(layer, tokens, left, before, residual);
            octavo_delta_net(states, layer.net, normed, size, tokens.count, mixed, dtype);
            if (narrows) {
                stream = gather(last_scratch[0], last_tokens, num_last, static_cast<const char*>(stream), size * item);
                const int64_t width = layer.output->k * item;
                mixed = gather(last_scratch[1], last_tokens, num_last, static_cast<char*>(mixed), width);
                tokens.count = num_last;
            }
        } else {
            GroupRows group = rows[caches[i].group];
            void* q = buffer(q_scratch, tokens, layer.num_heads * layer.head_size);
            if (narrows) {
                pre_attention(*last_keys, caches[i], group.slots, tokens, left, before, residual, q);
                tokens.count = num_last, group.query_start = last_start;
                tokens.positions = gather(last_scratch[0], last_tokens, num_last, positions);
                group.slots = gather(last_scratch[1], last_tokens, num_last, group.slots);
                stream = gather(last_scratch[2], last_tokens, num_last, static_cast<const char*>(stream), size * item);
                left.data = stream, before = {nullptr, 0};
            }
            const void* qkv = pre_attention(layer, caches[i], group.slots, tokens, left, before, residual, q);
            attend(layer, caches[i], group, tokens, q, mixed);
            if (layer.gated) weight_by_gates(layer, tokens, qkv, mixed);
        }
        post_attention(layer, tokens, mixed, {stream, size}, residual, now);
        left = {now, size}, before = {residual, size};
    }
    octavo_rms_norm(left.data, size, before.data, size, norm, out, residual, tokens.count, size, eps, dtype);
}
