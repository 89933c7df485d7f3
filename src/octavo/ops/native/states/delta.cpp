// The gated delta rule over the open chunk: octavo.ops.scan.reference.delta_chunk and delta_advance, bit for bit.
//
// A task is one row and one head of the keys, with the heads of the values that share it: it walks the chunks that the
// row has tokens of in this step, from the state at the border before them. Inputs are kept as they are used, rounded
// to the model's type.
#include <cmath>

#include "../include/chains.h"
#include "../include/kept.h"

namespace octavo {

struct DeltaRule {  // octavo.states.cpu._DeltaRule
    int64_t num_key_heads, num_heads, key_size, value_size;
    const float *decay, *dt_bias;  // [num_heads]
    float query_scale;
};

struct DeltaKept {  // in the order of GatedDeltaRule's tensors
    Kept state, key, value, update, decay, rate;

    bool alike() const {
        return TokenPlaces::serves(key, value) && TokenPlaces::serves(key, update) && TokenPlaces::serves(key, decay) &&
               TokenPlaces::serves(key, rate);
    }
};

template <class T>
struct DeltaArgs {
    const StateStep* step;
    const StateTables* tables;
    const DeltaKept* kept;
    const DeltaRule* rule;
    const T *qkv, *a, *b;
    int64_t qkv_stride, a_stride, b_stride;
    T* out;
};

// What a task works with: one chunk of a row. Rows are padded to a multiple of 16 with zeros.
struct DeltaScratch {
    float *keys, *vectors;    // [C, kp]; [2 C, kp]: k, then q, of the step's tokens
    float *between, *seen;    // [C, C]: k.k and q.k, then those times what is left of them
    float *updates;           // [C, vp], of one head
    float *rest;              // [2 C, vp]: S'k, then S'q
    float *total, *left, *rate;  // [C]
    float *weights;           // [kp, C]
    float *states, *advanced; // [heads, kp, vp]; [kp, vp]
    float *places;            // [2 C] of 64 bits
    const float* state[64];   // of each head
};

template <class T>
static void normalize(const T* x, int64_t n, int64_t padded, float scale, bool scaled, float* out) {
    widen(x, out, n);
    for (int64_t i = n; i < padded; ++i) out[i] = 0.0f;
    const float inverse = 1.0f / std::sqrt(dot16(out, out, padded) + 1e-6f);
    for (int64_t i = 0; i < padded; i += VL) {
        vf y = load(out + i) * inverse;
        store(out + i, scaled ? y * scale : y);
    }
}

template <class T>
class DeltaTask {
  public:
    DeltaTask(const DeltaArgs<T>& args, int64_t row, int64_t key_head, DeltaScratch& scratch)
        : args_(args), rule_(*args.rule), kept_(*args.kept), row_(*args.step, *args.tables, row), s_(scratch),
          key_head_(key_head), group_(rule_.num_heads / rule_.num_key_heads), kp_(padded16(rule_.key_size)),
          vp_(padded16(rule_.value_size)), chunk_(row_.chunk),
          places_(kept_.key, reinterpret_cast<int64_t*>(scratch.places)), alike_(kept_.alike()) {}

    // What the task reads, in its order, and where its first token is written.
    void tell(FetchList& list) {
        if (row_.computed >= row_.end) return;
        const int64_t border = row_.border(), size = rule_.value_size, key = rule_.key_size;
        if (alike_) tell_tokens(list, border, row_.computed - border);
        if (!border) return;
        const int64_t entry = border / chunk_ - 1, first = key_head_ * group_ * key, rows = group_ * key;
        if (kept_.state.line_size != size) return kept_.state.tell(list, row_.states, entry, first * size, rows * size);
        kept_.state.each_run(row_.states, entry, first, rows, [&](const float* from, int64_t, int64_t n) {
            list.add(from, n * kept_.state.line_bytes);
        });
    }

    // ahead: what the next task reads.
    void run(FetchList& ahead) {
        ahead_ = &ahead;
        ahead.begin(group_ * rule_.key_size);
        if (row_.computed >= row_.end) return;
        int64_t border = row_.border();
        for (int64_t h = 0; h < group_; ++h) load_state(border, h);
        for (; border < row_.end; border += chunk_) {
            first_ = row_.computed > border ? row_.computed - border : 0;
            last_ = row_.end - border < chunk_ ? row_.end - border : chunk_;
            if (alike_) places_.find(row_, border, last_);
            make_keys(border);
            for (int64_t h = 0; h < group_; ++h) head(border, h);
        }
    }

  private:
    void tell_tokens(FetchList& list, int64_t border, int64_t known) {
        const int64_t keys = rule_.key_size, values = group_ * rule_.value_size;
        places_.find(row_, border, known + 1);
        for (int64_t t = 0; t <= known; ++t) {
            places_.tell(list, kept_.key, t, key_head_ * keys, keys);
            places_.tell(list, kept_.update, t, key_head_ * values, values);
            places_.tell(list, kept_.decay, t, key_head_ * group_, group_);
        }
        places_.tell(list, kept_.value, known, key_head_ * values, values);
    }
    const T* token(int64_t border, int64_t place) const {
        return args_.qkv + (row_.first + border + place - row_.computed) * args_.qkv_stride;
    }

    // Whether the step passes no border, and reads a state once.
    bool stays(int64_t border) const { return border && row_.end - border < chunk_; }

    // What the tokens before the step's brought, and what token `t` of the chunk brings.
    void read_tokens(const Kept& kept, int64_t border, int64_t first, int64_t count, float* out,
                     int64_t out_row) const {
        if (alike_) places_.read(kept, first_, first, count, out, out_row);
        else row_.read_tokens(kept, border, border + first_, first, count, out, out_row);
    }
    void write(const Kept& kept, int64_t border, int64_t t, int64_t first, int64_t count, const float* values) const {
        if (alike_) places_.write(kept, t, first, count, values);
        else row_.write(kept, border + t, first, count, values);
    }
    void put(const Kept& kept, int64_t border, int64_t t, int64_t index, float value) const {
        if (alike_) places_.put(kept, t, index, value);
        else row_.put(kept, border + t, index, value);
    }

    // The products of vectors with the state of one head, where it lies or as it was read.
    void of_state(int64_t border, int64_t h, int64_t count, const float* vectors, float* out) {
        const auto beside = [this] { ahead_->step(); };
        const int64_t size = rule_.key_size, first = (key_head_ * group_ + h) * size;
        if (s_.state[h]) return add_chains(vectors, kp_, count, size, s_.state[h], vp_, vp_, out, vp_, beside);
        const int64_t entry = border / chunk_ - 1, stride = kept_.state.line_bytes / 4;
        kept_.state.each_run(row_.states, entry, first, size, [&](const float* rows, int64_t at, int64_t n) {
            add_chains(vectors + at, kp_, count, n, rows, stride, vp_, out, vp_, beside);
        });
    }

    void load_state(int64_t border, int64_t h) {
        const int64_t size = rule_.key_size * rule_.value_size, first = (key_head_ * group_ + h) * size;
        float* own = s_.states + h * kp_ * vp_;
        const bool whole = vp_ == rule_.value_size;
        s_.state[h] = border && whole ? kept_.state.direct(row_.states, border / chunk_ - 1, first, size) : nullptr;
        if (s_.state[h] || (whole && stays(border) && kept_.state.has_rows(vp_))) return;
        s_.state[h] = own;
        if (whole) return row_.read_state(kept_.state, border, first, size, own);
        for (int64_t d = 0; d < rule_.key_size; ++d) {
            std::memset(own + d * vp_, 0, 4 * vp_);
            row_.read_state(kept_.state, border, first + d * rule_.value_size, rule_.value_size, own + d * vp_);
        }
    }

    // Keys of the chunk, q and k of the step's tokens in it, and their products.
    void make_keys(int64_t border) {
        const int64_t size = rule_.key_size, fresh = last_ - first_, offset = rule_.num_key_heads * size;
        if (kp_ > size) std::memset(s_.keys, 0, 4 * first_ * kp_);
        read_tokens(kept_.key, border, key_head_ * size, size, s_.keys, kp_);
        for (int64_t t = first_; t < last_; ++t) {
            float* key = s_.keys + t * kp_;
            const T* x = token(border, t) + key_head_ * size;
            normalize(x + offset, size, kp_, 0.0f, false, key);
            for (int64_t i = 0; i < kp_; i += VL) store(key + i, rounded<T>(load(key + i)));
            normalize(x, size, kp_, rule_.query_scale, true, s_.vectors + (fresh + t - first_) * kp_);
            std::memcpy(s_.vectors + (t - first_) * kp_, key, 4 * kp_);
            write(kept_.key, border, t, key_head_ * size, size, key);
        }
        for (int64_t t = 0; t < fresh; ++t) {
            for (int64_t i = 0; i <= first_ + t; ++i) {
                s_.between[t * chunk_ + i] = dot16(s_.vectors + t * kp_, s_.keys + i * kp_, kp_);
                s_.seen[t * chunk_ + i] = dot16(s_.vectors + (fresh + t) * kp_, s_.keys + i * kp_, kp_);
            }
        }
    }

    // Sums of g and rates of one head: of places that are known from what is kept.
    void make_gates(int64_t border, int64_t head) {
        if (alike_) places_.read(kept_.decay, first_, head, s_.total);
        else row_.read_tokens(kept_.decay, border, border + first_, head, 1, s_.total, 1);
        float sum = first_ ? s_.total[first_ - 1] : 0.0f;
        for (int64_t t = first_; t < last_; ++t) {
            const int64_t at = row_.first + border + t - row_.computed;
            const float a = to_float(args_.a[at * args_.a_stride + head]);
            sum = sum + rule_.decay[head] * vsoftplus(a + rule_.dt_bias[head]);
            s_.rate[t] = sigmoid(to_float(args_.b[at * args_.b_stride + head]));
            put(kept_.decay, border, t, head, sum);
            put(kept_.rate, border, t, head, s_.rate[t]);
            s_.total[t] = sum;
        }
    }

    // exp(total[t] - total[i]) for i < count.
    void make_left(float total, int64_t count) {
        for (int64_t i = 0; i < count; i += VL) store(s_.left + i, vexp(total - load(s_.total + i)));
    }

    void head(int64_t border, int64_t h) {
        const int64_t head = key_head_ * group_ + h, size = rule_.value_size, fresh = last_ - first_;
        make_gates(border, head);
        if (vp_ > size) std::memset(s_.updates, 0, 4 * first_ * vp_);
        read_tokens(kept_.update, border, head * size, size, s_.updates, vp_);
        std::memset(s_.rest, 0, 8 * fresh * vp_);
        of_state(border, h, 2 * fresh, s_.vectors, s_.rest);
        for (int64_t t = 0; t < fresh; ++t) place(border, head, t);
        if (last_ == chunk_) advance(border + chunk_, h, head);
    }

    // One of the step's tokens: its update, and its result.
    void place(int64_t border, int64_t head, int64_t t) {
        const int64_t at = first_ + t, size = rule_.value_size, fresh = last_ - first_;
        const vf begun = splat(vexp(s_.total[at]));
        float *rest = s_.rest + t * vp_, *result = s_.rest + (fresh + t) * vp_, *update = s_.updates + at * vp_;
        make_left(s_.total[at], at + 1);
        s_.left[at] = 1.0f;
        const T* value = token(border, at) + 2 * rule_.num_key_heads * rule_.key_size + head * size;
        float* weight = s_.weights;
        widen(value, weight, size);
        write(kept_.value, border, at, head * size, size, weight);
        for (int64_t i = size; i < vp_; ++i) weight[i] = 0.0f;
        for (int64_t i = 0; i < vp_; i += VL) {
            store(rest + i, load(weight + i) - begun * load(rest + i));
            store(result + i, begun * load(result + i));
        }
        float* seen = weight + chunk_;
        for (int64_t i = 0; i < at; ++i) weight[i] = -(s_.left[i] * s_.between[t * chunk_ + i]);
        for (int64_t i = 0; i <= at; ++i) seen[i] = s_.left[i] * s_.seen[t * chunk_ + i];
        add_chains(weight, chunk_, 2, at, s_.updates, vp_, vp_, rest, result - rest);
        for (int64_t i = 0; i < vp_; i += VL) store(update + i, rounded<T>(s_.rate[at] * load(rest + i)));
        add_chains(seen + at, 0, 1, 1, update, vp_, vp_, result, vp_);
        narrow(result, args_.out + (row_.first + border + at - row_.computed) * rule_.num_heads * size + head * size,
               size);
        write(kept_.update, border, at, head * size, size, update);
    }

    // The state behind the chunk, as it is kept.
    void advance(int64_t border, int64_t h, int64_t head) {
        const int64_t size = rule_.key_size * rule_.value_size;
        const vf begun = splat(vexp(s_.total[chunk_ - 1]));
        make_left(s_.total[chunk_ - 1], chunk_);
        for (int64_t d = 0; d < rule_.key_size; ++d) {
            float* weight = s_.weights + d * chunk_;
            for (int64_t i = 0; i < chunk_; ++i) weight[i] = s_.left[i] * s_.keys[i * kp_ + d];
            for (int64_t i = 0; i < vp_; i += VL) store(s_.advanced + d * vp_ + i, begun * load(s_.state[h] + d * vp_ + i));
        }
        add_chains(s_.weights, chunk_, rule_.key_size, chunk_, s_.updates, vp_, vp_, s_.advanced, vp_);
        kept_.state.round(s_.advanced, rule_.key_size * vp_);
        float* own = s_.states + h * kp_ * vp_;
        std::memcpy(own, s_.advanced, 4 * rule_.key_size * vp_);
        s_.state[h] = own;
        if (vp_ == rule_.value_size) return row_.write_state(kept_.state, border, head * size, size, own);
        for (int64_t d = 0; d < rule_.key_size; ++d) {
            const int64_t first = head * size + d * rule_.value_size;
            row_.write_state(kept_.state, border, first, rule_.value_size, own + d * vp_);
        }
    }

    const DeltaArgs<T>& args_;
    const DeltaRule& rule_;
    const DeltaKept& kept_;
    const StateRow row_;
    DeltaScratch& s_;
    const int64_t key_head_, group_, kp_, vp_, chunk_;
    TokenPlaces places_;
    const bool alike_;  // the tensors of inputs are cut alike, and places_ are those of all
    FetchList* ahead_ = nullptr;
    int64_t first_ = 0, last_ = 0;  // places of the step's tokens in the chunk
};

static DeltaScratch scratch_of(const DeltaRule& rule, int64_t chunk, Scratch& memory) {
    const int64_t kp = padded16(rule.key_size), vp = padded16(rule.value_size), c = padded16(chunk);
    const int64_t group = rule.num_heads / rule.num_key_heads;
    DeltaScratch s;
    carve(memory, {{&s.keys, c * kp}, {&s.vectors, 2 * c * kp}, {&s.between, c * c}, {&s.seen, c * c},
                   {&s.updates, c * vp}, {&s.rest, 2 * c * vp}, {&s.total, c}, {&s.left, c}, {&s.rate, c},
                   {&s.weights, (kp > vp ? kp : vp) * c + c}, {&s.states, group * kp * vp}, {&s.advanced, kp * vp},
                   {&s.places, 4 * c}});
    return s;
}

template <class T>
static void run(const DeltaArgs<T>& args) {
    const DeltaRule& rule = *args.rule;
    const int64_t work = args.step->num_tokens * rule.num_heads * rule.key_size * rule.value_size;
    const int64_t heads = rule.num_key_heads, tasks = args.step->num_rows * heads;
    parallel_tasks(threads_for(work, 32768), tasks, [&](int64_t task) {
        static thread_local Scratch memory;
        DeltaScratch scratch = scratch_of(rule, args.tables->chunk, memory);
        const int64_t next = task + 1;
        FetchList ahead;
        if (next < tasks) DeltaTask<T>(args, next / heads, next % heads, scratch).tell(ahead);
        DeltaTask<T>(args, task / heads, task % heads, scratch).run(ahead);
    });
}

}  // namespace octavo

// qkv [tokens, channels of q, k, v], a and b [tokens, num_heads] with row strides in elements; out [tokens, num_heads *
// value_size] contiguous; kept: state, key, value, update, decay, rate.
OCTAVO_API void octavo_gated_delta(const octavo::StateStep* step, const octavo::StateTables* tables,
                                   const octavo::Kept* kept, const octavo::DeltaRule* rule, const void* qkv,
                                   int64_t qkv_stride, const void* a, int64_t a_stride, const void* b,
                                   int64_t b_stride, void* out, int32_t dtype) {
    using namespace octavo;
    const auto* all = reinterpret_cast<const DeltaKept*>(kept);
    if (dtype == F32) {
        run(DeltaArgs<float>{step, tables, all, rule, static_cast<const float*>(qkv), static_cast<const float*>(a),
                             static_cast<const float*>(b), qkv_stride, a_stride, b_stride, static_cast<float*>(out)});
    } else {
        run(DeltaArgs<bf16>{step, tables, all, rule, static_cast<const bf16*>(qkv), static_cast<const bf16*>(a),
                            static_cast<const bf16*>(b), qkv_stride, a_stride, b_stride, static_cast<bf16*>(out)});
    }
}
