// A gated delta net from the normed hidden state to what its output product takes, in one call: projections, short
// convolution, gated delta rule, norm of each head, gate. The operators are called one by one, so the bits are theirs.
#include "../include/kept.h"
#include "../include/operators.h"

namespace octavo {

// Where one operator's tensors are, and its operands; octavo.states.cpu._Told.
struct ToldOperator {
    const StateTables* tables;
    const Kept* kept;
    const void* operands;
};

struct DeltaNet {  // octavo.states.cpu._DeltaNet
    const Weight* project;
    const float* norm;  // [value_size]
    ToldOperator conv, rule;
    int64_t channels, num_heads, value_size;  // of q, k and v together; of the values
    float eps;
};

}  // namespace octavo

OCTAVO_API void octavo_short_conv(const octavo::StateStep* step, const octavo::StateTables* tables,
                                  const octavo::Kept* kept, const void* conv, const void* x, int64_t x_stride,
                                  void* out, int32_t dtype);
OCTAVO_API void octavo_gated_delta(const octavo::StateStep* step, const octavo::StateTables* tables,
                                   const octavo::Kept* kept, const void* rule, const void* qkv, int64_t qkv_stride,
                                   const void* a, int64_t a_stride, const void* b, int64_t b_stride, void* out,
                                   int32_t dtype);

// x [tokens, size] with its row stride in elements; out [tokens, num_heads * value_size] contiguous. The projections are
// q, k, v, then z, b, a.
OCTAVO_API void octavo_delta_net(const octavo::StateStep* step, const octavo::DeltaNet* net, const void* x,
                                 int64_t x_stride, int64_t tokens, void* out, int32_t dtype) {
    using namespace octavo;
    const int64_t item = dtype == F32 ? 4 : 2, width = net->project->n, heads = net->num_heads;
    const int64_t values = heads * net->value_size;
    static thread_local Scratch memory;
    const int64_t row = width + net->channels + values;  // a token's projections, its convolution, its results
    char* projected = static_cast<char*>(memory.bytes(tokens * row * item + 256));
    char* mixed = projected + tokens * width * item;
    char* found = mixed + tokens * net->channels * item;
    octavo_linear(x, x_stride, tokens, net->project, nullptr, projected, width, dtype, dtype);
    octavo_short_conv(step, net->conv.tables, net->conv.kept, net->conv.operands, projected, width, mixed, dtype);
    const char* b = projected + (net->channels + values) * item;
    octavo_gated_delta(step, net->rule.tables, net->rule.kept, net->rule.operands, mixed, net->channels,
                       b + heads * item, width, b, width, found, dtype);
    // the norm runs over heads as rows; its results overwrite them
    octavo_rms_norm(found, net->value_size, nullptr, 0, net->norm, found, nullptr, tokens * heads, net->value_size,
                    net->eps, dtype);
    octavo_gated_product(projected + net->channels * item, width, found, values, out, tokens, values, 0, dtype);
}
