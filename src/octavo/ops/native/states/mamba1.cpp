// Mamba-1 over the open chunk: octavo.ops.scan.reference.mamba1_chunk, bit for bit.
//
// The recurrence itself is the order, so the places of the open chunk are computed again, from the state at the border
// before them. A task is one row and 16 channels, which do not meet.
#include "../include/chains.h"
#include "../include/kept.h"

namespace octavo {

constexpr int64_t MOST_STATES = 256;

struct Mamba1Scan {  // octavo.states.cpu._Mamba1Scan
    int64_t channels, state_size;
    const float* decay;           // [state_size, channels]
    const float *dt_bias, *skip;  // [channels]
};

struct Mamba1Kept {  // in the order of Mamba1Scan's tensors
    Kept state, x, dt, b;
};

template <class T>
struct Mamba1Args {
    const StateStep* step;
    const StateTables* tables;
    const Mamba1Kept* kept;
    const Mamba1Scan* scan;
    const T *x, *dt, *b, *c;
    int64_t x_stride, dt_stride, b_stride, c_stride;
    T* out;
};

template <class T>
static void scan_channels(const Mamba1Args<T>& args, int64_t row_index, int64_t begin) {
    const Mamba1Scan& scan = *args.scan;
    const Mamba1Kept& kept = *args.kept;
    const StateRow row(*args.step, *args.tables, row_index);
    if (row.computed >= row.end) return;
    const int64_t states = scan.state_size, channels = scan.channels;
    const int64_t count = channels - begin < VL ? channels - begin : VL;
    float state[MOST_STATES][VL], b[MOST_STATES], c[MOST_STATES];
    for (int64_t n = 0; n < states; ++n) {
        store(state[n], vf{});
        row.read_state(kept.state, row.border(), n * channels + begin, count, state[n]);
    }
    const vf bias = load_first(scan.dt_bias + begin, count), skip = load_first(scan.skip + begin, count);
    for (int64_t position = row.border(); position < row.end; ++position) {
        const int64_t token = row.first + position - row.computed;
        const bool is_new = position >= row.computed;
        float x[VL] = {}, dt[VL] = {};
        if (is_new) {
            store(x, load_first(args.x + token * args.x_stride + begin, count));
            store(dt, vsoftplus(load_first(args.dt + token * args.dt_stride + begin, count) + bias));
            widen(args.b + token * args.b_stride, b, states);
            widen(args.c + token * args.c_stride, c, states);
            row.write(kept.x, position, begin, count, x);
            row.write(kept.dt, position, begin, count, dt);
            if (begin == 0) row.write(kept.b, position, 0, states, b);
        } else {
            row.read(kept.x, position, begin, count, x);
            row.read(kept.dt, position, begin, count, dt);
            row.read(kept.b, position, 0, states, b);
        }
        const vf step = load(dt), value = load(x), gained = step * value;
        vf result = vf{};
        for (int64_t n = 0; n < states; ++n) {
            const vf left = vexp(step * load_first(scan.decay + n * channels + begin, count)) * load(state[n]);
            const vf own = left + gained * b[n];
            store(state[n], own);
            if (is_new) result = result + own * c[n];
        }
        if (is_new) store_first(args.out + token * channels + begin, result + skip * value, count);
        if ((position + 1) % row.chunk) continue;
        for (int64_t n = 0; n < states; ++n) {
            kept.state.round(state[n], VL);
            row.write_state(kept.state, position + 1, n * channels + begin, count, state[n]);
        }
    }
}

template <class T>
static void run(const Mamba1Args<T>& args) {
    const int64_t blocks = (args.scan->channels + VL - 1) / VL;
    const int64_t work = args.step->num_tokens * args.scan->channels * args.scan->state_size;
    parallel_tasks(threads_for(work, 8192), args.step->num_rows * blocks,
                   [&](int64_t task) { scan_channels(args, task / blocks, task % blocks * VL); });
}

}  // namespace octavo

// x and dt [tokens, channels], b and c [tokens, state_size] with row strides in elements; out [tokens, channels]
// contiguous; kept: state, x, dt, b. state_size is at most 256.
OCTAVO_API void octavo_mamba1(const octavo::StateStep* step, const octavo::StateTables* tables,
                              const octavo::Kept* kept, const octavo::Mamba1Scan* scan, const void* x,
                              int64_t x_stride, const void* dt, int64_t dt_stride, const void* b, int64_t b_stride,
                              const void* c, int64_t c_stride, void* out, int32_t dtype) {
    using namespace octavo;
    const auto* all = reinterpret_cast<const Mamba1Kept*>(kept);
    if (dtype == F32) {
        run(Mamba1Args<float>{step, tables, all, scan, static_cast<const float*>(x), static_cast<const float*>(dt),
                              static_cast<const float*>(b), static_cast<const float*>(c), x_stride, dt_stride,
                              b_stride, c_stride, static_cast<float*>(out)});
    } else {
        run(Mamba1Args<bf16>{step, tables, all, scan, static_cast<const bf16*>(x), static_cast<const bf16*>(dt),
                             static_cast<const bf16*>(b), static_cast<const bf16*>(c), x_stride, dt_stride, b_stride,
                             c_stride, static_cast<bf16*>(out)});
    }
}
