// Mamba-1 over the open chunk: octavo.ops.scan.reference.mamba1_chunk, bit for bit.
//
// The recurrence itself is the order, so the places of the open chunk are computed again, from the state at the border
// before them. A task is one row and 64 channels, which do not meet.
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

// A task's channels, and what it works with: rows of so many, whose places are looked up once.
constexpr int64_t TASK_CHANNELS = 64;

struct Mamba1Scratch {
    float state[MOST_STATES][TASK_CHANNELS];
    float x[TASK_CHANNELS], dt[TASK_CHANNELS], b[MOST_STATES], c[MOST_STATES];
};

// One position of 16 channels, `lane` the first of them in the task: the state advances, and of a new token the result
// is given, without its skip.
static OCTAVO_INLINE vf advance(const Mamba1Scan& scan, Mamba1Scratch& s, int64_t begin, int64_t lane, int64_t count,
                                bool is_new) {
    const vf step = load(s.dt + lane), gained = step * load(s.x + lane);
    const float* decay = scan.decay + begin + lane;
    vf result = vf{};
    for (int64_t n = 0; n < scan.state_size; ++n, decay += scan.channels) {
        const vf left = vexp(step * load_first(decay, count)) * load(s.state[n] + lane);
        const vf own = left + gained * s.b[n];
        store(s.state[n] + lane, own);
        if (is_new) result = result + own * s.c[n];
    }
    return result;
}

// What the token at `position` brings to the task's channels: read from the step, and kept, or found where it is kept.
template <class T>
static void take_token(const Mamba1Args<T>& args, const StateRow& row, int64_t position, int64_t begin, int64_t count,
                       Mamba1Scratch& s) {
    const Mamba1Kept& kept = *args.kept;
    const int64_t states = args.scan->state_size, token = row.first + position - row.computed;
    if (position < row.computed) {
        row.read_on(kept.x, position, begin, count, s.x);
        row.read_on(kept.dt, position, begin, count, s.dt);
        return row.read(kept.b, position, 0, states, s.b);
    }
    widen(args.x + token * args.x_stride + begin, s.x, count);
    widen(args.dt + token * args.dt_stride + begin, s.dt, count);
    for (int64_t i = 0; i < count; i += VL) {
        const int64_t n = count - i < VL ? count - i : VL;
        store(s.dt + i, vsoftplus(load(s.dt + i) + load_first(args.scan->dt_bias + begin + i, n)));
    }
    widen(args.b + token * args.b_stride, s.b, states);
    widen(args.c + token * args.c_stride, s.c, states);
    row.write(kept.x, position, begin, count, s.x);
    row.write(kept.dt, position, begin, count, s.dt);
    if (begin == 0) row.write(kept.b, position, 0, states, s.b);
}

template <class T>
static void scan_channels(const Mamba1Args<T>& args, int64_t row_index, int64_t begin) {
    const Mamba1Scan& scan = *args.scan;
    const Mamba1Kept& kept = *args.kept;
    const StateRow row(*args.step, *args.tables, row_index);
    if (row.computed >= row.end) return;
    const int64_t states = scan.state_size, channels = scan.channels;
    const int64_t count = channels - begin < TASK_CHANNELS ? channels - begin : TASK_CHANNELS;
    Mamba1Scratch s;
    if (count % VL) std::memset(s.x, 0, sizeof s.x), std::memset(s.dt, 0, sizeof s.dt);
    for (int64_t n = 0; n < states; ++n) {
        if (count % VL) std::memset(s.state[n], 0, sizeof s.state[n]);
        row.read_state_on(kept.state, row.border(), n * channels + begin, count, s.state[n]);
    }
    for (int64_t position = row.border(); position < row.end; ++position) {
        const int64_t token = row.first + position - row.computed;
        const bool is_new = position >= row.computed;
        take_token(args, row, position, begin, count, s);
        for (int64_t i = 0; i < count; i += VL) {
            const int64_t n = count - i < VL ? count - i : VL;
            const vf result = advance(scan, s, begin, i, n, is_new);
            if (!is_new) continue;
            const vf skip = load_first(scan.skip + begin + i, n);
            store_first(args.out + token * channels + begin + i, result + skip * load(s.x + i), n);
        }
        if ((position + 1) % row.chunk) continue;
        for (int64_t n = 0; n < states; ++n) {
            kept.state.round(s.state[n], TASK_CHANNELS);
            row.write_state(kept.state, position + 1, n * channels + begin, count, s.state[n]);
        }
    }
}

template <class T>
static void run(const Mamba1Args<T>& args) {
    const int64_t blocks = (args.scan->channels + TASK_CHANNELS - 1) / TASK_CHANNELS;
    const int64_t work = args.step->num_tokens * args.scan->channels * args.scan->state_size;
    parallel_tasks(threads_for(work, 8192), args.step->num_rows * blocks,
                   [&](int64_t task) { scan_channels(args, task / blocks, task % blocks * TASK_CHANNELS); });
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
