// Mamba-2 over the open chunk: octavo.ops.scan.reference.mamba2_chunk and mamba2_advance, bit for bit.
//
// A task is one row and one group of B and C, with the heads that share it: it walks the chunks that the row has tokens
// of in this step, from the state at the border before them.
#include "../include/chains.h"
#include "../include/kept.h"

namespace octavo {

struct Mamba2Scan {  // octavo.states.cpu._Mamba2Scan
    int64_t num_heads, head_size, num_groups, state_size;
    const float *decay, *dt_bias, *skip;  // [num_heads]
    float dt_min, dt_max;
};

struct Mamba2Kept {  // in the order of Mamba2Scan's tensors
    Kept state, x, b, decay, dt;
};

template <class T>
struct Mamba2Args {
    const StateStep* step;
    const StateTables* tables;
    const Mamba2Kept* kept;
    const Mamba2Scan* scan;
    const T *xbc, *dt;
    int64_t xbc_stride, dt_stride;
    T* out;
};

// What a task works with: one chunk of a row. Rows are padded to a multiple of 16 with zeros.
struct Mamba2Scratch {
    float *b, *c;              // [C, np]; c: of the step's tokens
    float* seen;               // [C, C]: c.b
    float *values, *results;   // [C, pp], of one head
    float *total, *left, *dt;  // [C]
    float* weights;            // [np, C]
    float *states, *advanced;  // [heads, np, pp]; [np, pp]
    const float* state[256];   // of each head
};

template <class T>
class Mamba2Task {
  public:
    Mamba2Task(const Mamba2Args<T>& args, int64_t row, int64_t group, Mamba2Scratch& scratch)
        : args_(args), scan_(*args.scan), kept_(*args.kept), row_(*args.step, *args.tables, row), s_(scratch),
          group_(group), heads_(scan_.num_heads / scan_.num_groups), np_(padded16(scan_.state_size)),
          pp_(padded16(scan_.head_size)), chunk_(row_.chunk) {}

    void run() {
        if (row_.computed >= row_.end) return;
        int64_t border = row_.border();
        for (int64_t h = 0; h < heads_; ++h) load_state(border, h);
        for (; border < row_.end; border += chunk_) {
            first_ = row_.computed > border ? row_.computed - border : 0;
            last_ = row_.end - border < chunk_ ? row_.end - border : chunk_;
            make_pairs(border);
            for (int64_t h = 0; h < heads_; ++h) head(border, h);
        }
    }

  private:
    int64_t token(int64_t border, int64_t place) const { return row_.first + border + place - row_.computed; }

    // Whether the step passes no border, and reads a state once.
    bool stays(int64_t border) const { return border && row_.end - border < chunk_; }

    // The products of vectors with the state of one head, where it lies or as it was read.
    void of_state(int64_t border, int64_t h, int64_t count, const float* vectors, float* out) {
        if (s_.state[h]) return add_chains(vectors, np_, count, scan_.state_size, s_.state[h], pp_, pp_, out, pp_);
        const int64_t first = (group_ * heads_ + h) * scan_.state_size, stride = kept_.state.line_bytes / 4;
        kept_.state.each_run(row_.states, border / chunk_ - 1, first, scan_.state_size, [&](const float* rows, int64_t at, int64_t n) {
            add_chains(vectors + at, np_, count, n, rows, stride, pp_, out, pp_);
        });
    }

    void load_state(int64_t border, int64_t h) {
        const int64_t size = scan_.state_size * scan_.head_size, first = (group_ * heads_ + h) * size;
        float* own = s_.states + h * np_ * pp_;
        const bool whole = pp_ == scan_.head_size;
        s_.state[h] = border && whole ? kept_.state.direct(row_.states, border / chunk_ - 1, first, size) : nullptr;
        if (s_.state[h] || (whole && stays(border) && kept_.state.has_rows(pp_))) return;
        s_.state[h] = own;
        if (whole) return row_.read_state(kept_.state, border, first, size, own);
        for (int64_t n = 0; n < scan_.state_size; ++n) {
            std::memset(own + n * pp_, 0, 4 * pp_);
            row_.read_state(kept_.state, border, first + n * scan_.head_size, scan_.head_size, own + n * pp_);
        }
    }

    // B of the chunk, C of the step's tokens in it, and their products.
    void make_pairs(int64_t border) {
        const int64_t size = scan_.state_size, inner = scan_.num_heads * scan_.head_size;
        if (np_ > size) std::memset(s_.b, 0, 4 * first_ * np_);
        row_.read_tokens(kept_.b, border, border + first_, group_ * size, size, s_.b, np_);
        for (int64_t t = first_; t < last_; ++t) {
            float* b = s_.b + t * np_;
            for (int64_t i = size; i < np_; ++i) b[i] = 0.0f;
            const T* x = args_.xbc + token(border, t) * args_.xbc_stride + inner + group_ * size;
            float* c = s_.c + (t - first_) * np_;
            for (int64_t i = size; i < np_; ++i) c[i] = 0.0f;
            widen(x, b, size);
            widen(x + scan_.num_groups * size, c, size);
            row_.write(kept_.b, border + t, group_ * size, size, b);
        }
        for (int64_t t = first_; t < last_; ++t)
            for (int64_t i = 0; i <= t; ++i)
                s_.seen[(t - first_) * chunk_ + i] = dot16(s_.c + (t - first_) * np_, s_.b + i * np_, np_);
    }

    // Sums of dt * decay, and dt, of one head.
    void make_gates(int64_t border, int64_t head) {
        row_.read_tokens(kept_.decay, border, border + first_, head, 1, s_.total, 1);
        row_.read_tokens(kept_.dt, border, border + first_, head, 1, s_.dt, 1);
        float sum = first_ ? s_.total[first_ - 1] : 0.0f;
        for (int64_t t = first_; t < last_; ++t) {
            float dt = vsoftplus(to_float(args_.dt[token(border, t) * args_.dt_stride + head]) + scan_.dt_bias[head]);
            dt = dt < scan_.dt_min ? scan_.dt_min : dt > scan_.dt_max ? scan_.dt_max : dt;
            sum = sum + dt * scan_.decay[head];
            s_.dt[t] = dt;
            row_.put(kept_.decay, border + t, head, sum);
            row_.put(kept_.dt, border + t, head, dt);
            s_.total[t] = sum;
        }
    }

    void make_left(float total, int64_t count) {
        for (int64_t i = 0; i < count; i += VL) store(s_.left + i, vexp(total - load(s_.total + i)));
    }

    void head(int64_t border, int64_t h) {
        const int64_t head = group_ * heads_ + h, size = scan_.head_size, fresh = last_ - first_;
        make_gates(border, head);
        if (pp_ > size) std::memset(s_.values, 0, 4 * last_ * pp_);
        row_.read_tokens(kept_.x, border, border + first_, head * size, size, s_.values, pp_);
        for (int64_t t = first_; t < last_; ++t) {
            float* x = s_.values + t * pp_;
            widen(args_.xbc + token(border, t) * args_.xbc_stride + head * size, x, size);
            row_.write(kept_.x, border + t, head * size, size, x);
        }
        std::memset(s_.results, 0, 4 * fresh * pp_);
        of_state(border, h, fresh, s_.c, s_.results);
        for (int64_t t = 0; t < fresh; ++t) place(border, head, t);
        if (last_ == chunk_) advance(border + chunk_, h, head);
    }

    // One of the step's tokens.
    void place(int64_t border, int64_t head, int64_t t) {
        const int64_t at = first_ + t, size = scan_.head_size;
        const vf begun = splat(vexp(s_.total[at])), skip = splat(scan_.skip[head]);
        float *result = s_.results + t * pp_, *weight = s_.weights;
        make_left(s_.total[at], at + 1);
        s_.left[at] = 1.0f;
        for (int64_t i = 0; i < pp_; i += VL) store(result + i, begun * load(result + i));
        for (int64_t i = 0; i <= at; ++i) weight[i] = s_.left[i] * s_.seen[t * chunk_ + i] * s_.dt[i];
        add_chains(weight, 0, 1, at + 1, s_.values, pp_, pp_, result, pp_);
        const float* x = s_.values + at * pp_;
        for (int64_t i = 0; i < pp_; i += VL) store(result + i, load(result + i) + skip * load(x + i));
        narrow(result, args_.out + token(border, at) * scan_.num_heads * size + head * size, size);
    }

    // The state behind the chunk, as it is kept.
    void advance(int64_t border, int64_t h, int64_t head) {
        const int64_t size = scan_.state_size * scan_.head_size;
        const vf begun = splat(vexp(s_.total[chunk_ - 1]));
        make_left(s_.total[chunk_ - 1], chunk_);
        for (int64_t n = 0; n < scan_.state_size; ++n) {
            float *weight = s_.weights + n * chunk_, *row = s_.advanced + n * pp_;
            for (int64_t i = 0; i < chunk_; ++i) weight[i] = s_.left[i] * (s_.dt[i] * s_.b[i * np_ + n]);
            for (int64_t i = 0; i < pp_; i += VL) store(row + i, begun * load(s_.state[h] + n * pp_ + i));
        }
        add_chains(s_.weights, chunk_, scan_.state_size, chunk_, s_.values, pp_, pp_, s_.advanced, pp_);
        kept_.state.round(s_.advanced, scan_.state_size * pp_);
        float* own = s_.states + h * np_ * pp_;
        std::memcpy(own, s_.advanced, 4 * scan_.state_size * pp_);
        s_.state[h] = own;
        if (pp_ == scan_.head_size) return row_.write_state(kept_.state, border, head * size, size, own);
        for (int64_t n = 0; n < scan_.state_size; ++n) {
            const int64_t first = head * size + n * scan_.head_size;
            row_.write_state(kept_.state, border, first, scan_.head_size, own + n * pp_);
        }
    }

    const Mamba2Args<T>& args_;
    const Mamba2Scan& scan_;
    const Mamba2Kept& kept_;
    const StateRow row_;
    Mamba2Scratch& s_;
    const int64_t group_, heads_, np_, pp_, chunk_;
    int64_t first_ = 0, last_ = 0;  // places of the step's tokens in the chunk
};

static Mamba2Scratch scratch_of(const Mamba2Scan& scan, int64_t chunk, Scratch& memory) {
    const int64_t np = padded16(scan.state_size), pp = padded16(scan.head_size), c = padded16(chunk);
    const int64_t heads = scan.num_heads / scan.num_groups;
    Mamba2Scratch s;
    carve(memory, {{&s.b, c * np}, {&s.c, c * np}, {&s.seen, c * c}, {&s.values, c * pp}, {&s.results, c * pp},
                   {&s.total, c}, {&s.left, c}, {&s.dt, c}, {&s.weights, np * c + c}, {&s.states, heads * np * pp},
                   {&s.advanced, np * pp}});
    return s;
}

template <class T>
static void run(const Mamba2Args<T>& args) {
    const Mamba2Scan& scan = *args.scan;
    const int64_t work = args.step->num_tokens * scan.num_heads * scan.state_size * scan.head_size;
    parallel_tasks(threads_for(work, 32768), args.step->num_rows * scan.num_groups, [&](int64_t task) {
        static thread_local Scratch memory;
        Mamba2Scratch scratch = scratch_of(scan, args.tables->chunk, memory);
        Mamba2Task<T>(args, task / scan.num_groups, task % scan.num_groups, scratch).run();
    });
}

}  // namespace octavo

// xbc [tokens, channels of x, B, C] and dt [tokens, num_heads] with row strides in elements; out [tokens, num_heads *
// head_size] contiguous; kept: state, x, b, decay, dt.
OCTAVO_API void octavo_mamba2(const octavo::StateStep* step, const octavo::StateTables* tables,
                              const octavo::Kept* kept, const octavo::Mamba2Scan* scan, const void* xbc,
                              int64_t xbc_stride, const void* dt, int64_t dt_stride, void* out, int32_t dtype) {
    using namespace octavo;
    const auto* all = reinterpret_cast<const Mamba2Kept*>(kept);
    if (dtype == F32) {
        run(Mamba2Args<float>{step, tables, all, scan, static_cast<const float*>(xbc), static_cast<const float*>(dt),
                              xbc_stride, dt_stride, static_cast<float*>(out)});
    } else {
        run(Mamba2Args<bf16>{step, tables, all, scan, static_cast<const bf16*>(xbc), static_cast<const bf16*>(dt),
                             xbc_stride, dt_stride, static_cast<bf16*>(out)});
    }
}
