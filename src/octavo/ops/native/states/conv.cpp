// The short convolution: octavo.ops.scan.reference.convolve, bit for bit.
//
// The tokens before the step's are inputs of the open chunk, or before its border the state there. A task is one row
// and 256 channels, which do not meet.
#include "../include/chains.h"
#include "../include/kept.h"

namespace octavo {

constexpr int64_t CONV_CHANNELS = 256, MOST_WIDTH = 16;

struct ShortConv {  // octavo.states.cpu._ShortConv
    int64_t channels, width;
    const float *weight, *bias;  // [width, channels]; [channels] or null
    int32_t silu;
};

struct ConvKept {
    Kept state, input;
};

template <class T>
struct ConvArgs {
    const StateStep* step;
    const StateTables* tables;
    const ConvKept* kept;
    const ShortConv* conv;
    const T* x;
    int64_t x_stride;
    T* out;
};

// Asks for what the row's first token is computed from, while another row is: rows lie anywhere in the cache.
template <class T>
static void fetch_row(const ConvArgs<T>& args, int64_t row_index, int64_t begin) {
    const ShortConv& conv = *args.conv;
    const StateRow row(*args.step, *args.tables, row_index);
    if (row.computed >= row.end) return;
    const int64_t count = conv.channels - begin < CONV_CHANNELS ? conv.channels - begin : CONV_CHANNELS;
    const int64_t oldest = row.computed - conv.width + 1, border = row.border();
    for (int64_t position = oldest > border ? oldest : border; position <= row.computed; ++position)
        row.fetch(args.kept->input, position, begin, count);
}

template <class T>
static void convolve(const ConvArgs<T>& args, int64_t row_index, int64_t begin) {
    const ShortConv& conv = *args.conv;
    const ConvKept& kept = *args.kept;
    const StateRow row(*args.step, *args.tables, row_index);
    if (row.computed >= row.end) return;
    const int64_t before = conv.width - 1, border = row.border();
    const int64_t count = conv.channels - begin < CONV_CHANNELS ? conv.channels - begin : CONV_CHANNELS;
    // inputs of the last `width` tokens: that of position p stands at p % width
    static thread_local float window[MOST_WIDTH][CONV_CHANNELS];
    for (int64_t position = row.computed - before; position < row.computed; ++position) {
        float* own = window[(position + conv.width) % conv.width];
        if (position >= border) row.read(kept.input, position, begin, count, own);
        else row.read_state(kept.state, border, (position - border + before) * conv.channels + begin, count, own);
    }
    for (int64_t position = row.computed; position < row.end; ++position) {
        const int64_t token = row.first + position - row.computed;
        const T* x = args.x + token * args.x_stride + begin;
        T* out = args.out + token * conv.channels + begin;
        float* own = window[position % conv.width];
        widen(x, own, count);
        row.write(kept.input, position, begin, count, own);
        const float* inputs[MOST_WIDTH];  // from the oldest on
        for (int64_t j = 0; j < conv.width; ++j) inputs[j] = window[(position + 1 + j) % conv.width];
        for (int64_t i = 0; i < count; i += VL) {
            const int64_t n = count - i < VL ? count - i : VL;
            vf sum = vf{};
            if (conv.bias) sum = sum + load_first(conv.bias + begin + i, n);
            for (int64_t j = 0; j < conv.width; ++j) {
                sum = sum + load_first(inputs[j] + i, n) * load_first(conv.weight + j * conv.channels + begin + i, n);
            }
            if (conv.silu) sum = sum / (vexp(-sum) + 1.0f);
            store_first(out + i, sum, n);
        }
        if ((position + 1) % row.chunk) continue;
        for (int64_t j = 0; j < before; ++j) {
            const float* value = window[(position + 2 + j) % conv.width];
            row.write_state(kept.state, position + 1, j * conv.channels + begin, count, value);
        }
    }
}

template <class T>
static void run(const ConvArgs<T>& args) {
    const int64_t blocks = (args.conv->channels + CONV_CHANNELS - 1) / CONV_CHANNELS;
    const int64_t tasks = args.step->num_rows * blocks;
    parallel_tasks(threads_for(args.step->num_tokens * args.conv->channels, 8192), tasks, [&](int64_t task) {
        const int64_t next = task + 1;
        if (next < tasks) fetch_row(args, next / blocks, next % blocks * CONV_CHANNELS);
        convolve(args, task / blocks, task % blocks * CONV_CHANNELS);
    });
}

}  // namespace octavo

// x [tokens, channels] with its row stride in elements; out [tokens, channels] contiguous; kept: the last inputs before a
// border, and those of the open chunk. width is at most 16.
OCTAVO_API void octavo_short_conv(const octavo::StateStep* step, const octavo::StateTables* tables,
                                  const octavo::Kept* kept, const octavo::ShortConv* conv, const void* x,
                                  int64_t x_stride, void* out, int32_t dtype) {
    using namespace octavo;
    const auto* all = reinterpret_cast<const ConvKept*>(kept);
    if (dtype == F32) {
        run(ConvArgs<float>{step, tables, all, conv, static_cast<const float*>(x), x_stride, static_cast<float*>(out)});
    } else {
        run(ConvArgs<bf16>{step, tables, all, conv, static_cast<const bf16*>(x), x_stride, static_cast<bf16*>(out)});
    }
}
