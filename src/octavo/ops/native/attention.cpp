// Attention over the paged cache, prefill and decode alike (octavo/ops/attention/__init__.py).
//
// A task is (row, kv head, up to MAX_ROWS query rows); a query row is one (query, head) pair of the kv head's group.
// Per leaf of LEAF tokens an online softmax over tiles of TILE tokens, both counted from position 0; leaves are folded
// in ascending order. Whether leaves of a task run one after another or on several threads, the arithmetic is the same.
// A query row's sums run over exactly the tokens that it sees: a token that only a neighbour sees adds nothing.
// bfloat16 queries over a bfloat16 cache may be multiplied in pairs, with sums of their own (attention_pairs.h).
#include <algorithm>
#include <cmath>
#include <vector>

#include "include/attention_pairs.h"
#include "include/attention_plan.h"
#include "include/attention_rows.h"
#include "include/operators.h"

namespace octavo {
namespace {

using Call = AttentionCall;
using Task = AttentionTask;

static_assert(TILE == 32 && LEAF % TILE == 0, "two vectors of 16 lanes per tile");

// What a set of query rows has seen so far: out = acc / sum.
struct Partial {
    float *acc, *max, *sum;  // [rows][padded], [rows], [rows]

    static int64_t size(int64_t rows, int64_t padded) { return rows * (padded + 16); }
    static Partial at(float* base, int64_t rows, int64_t padded) {
        return {base, base + rows * padded, base + rows * padded + rows};
    }
};

// Calls F<R>::run for R = rows <= MICRO.
#define OCTAVO_BY_ROWS(rows, F, ...)        \
    do {                                    \
        if (rows == 1) F<1>(__VA_ARGS__);   \
        else if (rows == 2) F<2>(__VA_ARGS__); \
        else if (rows == 3) F<(MICRO > 2 ? 3 : 1)>(__VA_ARGS__); \
        else F<(MICRO > 2 ? 4 : 1)>(__VA_ARGS__); \
    } while (0)

// ---- one leaf ----------------------------------------------------------------------------------------------------

// Per-thread buffers of a task.
struct Work {
    float *q, *weights, *rows_copy, *lane_sums;  // [rows][padded], [rows][TILE], [TILE][padded32], [rows][16]
    float *running, *leaf;                       // Partial
    int32_t* positions;  // [rows]
    const float* pointers[TILE];         // K or V of the tile's tokens, padded float32
    const char *here[TILE], *next[TILE];  // cache rows of this tile's and the next tile's tokens
};

// In pairs: `q` are the blocks of score_rows, `weights` end as bfloat16, `rows_copy` holds a tile's keys or values.
template <class T, class K, bool PAIRS>
class Leaf {
  public:
    Leaf(const Call& call, const Task& task, Work& work)
        : call_(call), task_(task), work_(work), padded_(call.padded()), group_(call.group()),
          num_rows_(task.num_queries * group_) {
        for (int64_t r = 0; r < num_rows_; ++r) work_.positions[r] = int32_t(task.position + r / group_);
    }

    // The partial of the task's query rows over leaf `index`, from scratch.
    void run(int64_t index, Partial to) {
        std::fill(to.acc, to.acc + num_rows_ * padded_, 0.0f);
        std::fill(to.max, to.max + num_rows_, -INFINITY);
        std::fill(work_.lane_sums, work_.lane_sums + num_rows_ * 16, 0.0f);
        Range all = call_.seen_by(task_.row, task_.position, task_.num_queries);
        int64_t end = std::min((index + 1) * LEAF, all.end);
        int64_t seen_first = all.begin, located = -1;  // the tile whose rows are in work_.here
        for (int64_t start = std::max(index * LEAF, seen_first / TILE * TILE); start < end; start += TILE) {
            Range tile = {std::max(seen_first - start, int64_t(0)), std::min(end - start, int64_t(TILE))};
            if (located != start) locate(start, tile, work_.here);
            located = start + TILE;
            if (located < all.end) locate(located, {0, std::min(all.end - located, int64_t(TILE))}, work_.next);
            if constexpr (PAIRS) {
                scores_in_pairs(start, to);
                values_in_pairs(start, to);
            } else {
                scores(start, tile, to);
                values(start, tile, to);
            }
            std::swap(work_.here, work_.next);
        }
        for (int64_t r = 0; r < num_rows_; ++r) to.sum[r] = reduce_add(lanes16::load(work_.lane_sums + r * 16));
    }

  private:
    // Positions that query row r sees.
    Range seen(int64_t r) const { return call_.seen(task_.row, work_.positions[r]); }
    // The same within the tile that begins at `start`.
    Range seen_in(int64_t r, int64_t start) const {
        Range range = seen(r);
        return {std::max(range.begin - start, int64_t(0)), std::min(range.end - start, int64_t(TILE))};
    }

    // The cache rows of the tile's visible tokens; its other entries repeat one of them.
    void locate(int64_t start, Range tile, const char** rows) const {
        const K* base = static_cast<const K*>(call_.kv) + task_.head * call_.kv_head;
        const int32_t* table = call_.block_table + task_.row * call_.table_row;
        int64_t column = (start + tile.begin) / call_.block_size, offset = (start + tile.begin) % call_.block_size;
        for (int64_t t = tile.begin; t < tile.end; ++t) {
            rows[t] = reinterpret_cast<const char*>(base + table[column] * call_.kv_block + offset * call_.kv_token);
            if (++offset == call_.block_size) offset = 0, ++column;
        }
        std::fill(rows, rows + tile.begin, rows[tile.begin]);
        std::fill(rows + tile.end, rows + TILE, rows[tile.end - 1]);
    }
    // Point at K (part 0) or V (part 1) of the tile's visible tokens.
    void gather(Range tile, int part) {
        const int64_t value_bytes = call_.value_start() * sizeof(K);
        const float* scales = part && call_.value_size == 0 ? call_.extras.value_scale : call_.extras.key_scale;
        for (int64_t t = tile.begin; t < tile.end; ++t)
            work_.pointers[t] = as_float_row(reinterpret_cast<const K*>(work_.here[t] + part * value_bytes),
                                             work_.rows_copy + t * padded_, scales);
    }
    // The next tile's K (part 0) or V (part 1); only the first query rows of a task ask for them.
    Ahead ahead(int64_t r, int part) const {
        return r == 0 ? Ahead{work_.next, part * call_.value_start() * int64_t(sizeof(K)), sizeof(K)} : Ahead{};
    }
    const float* as_float_row(const float* row, float* copy, const float*) const {
        return padded_ == call_.head_size ? row : widen(row, copy);
    }
    const float* as_float_row(const bf16* row, float* copy, const float*) const { return widen(row, copy); }
    template <class Q>
    const float* as_float_row(const Q* row, float* copy, const float* scales) const {
        widen(row, copy);
        if (scales != nullptr)
            for (int64_t c = 0; c < padded_; c += VL) store(copy + c, load(copy + c) * scales[task_.head]);
        return copy;
    }
    template <class U>
    const float* widen(const U* row, float* copy) const {
        int64_t c = 0;
        for (; c + VL <= call_.head_size; c += VL) store(copy + c, load(row + c));
        for (; c < padded_; c += VL) store(copy + c, load_first(row + c, std::max(call_.head_size - c, int64_t(0))));
        return copy;
    }

    // Dot products, then the weights e^(score - max) of every query row; rescales what the rows hold already.
    void scores(int64_t start, Range tile, Partial to) {
        gather(tile, 0);
        for (int64_t r = 0; r < num_rows_; r += MICRO) {
            int64_t rows = std::min(num_rows_ - r, int64_t(MICRO));
            Range all = {seen_in(r, start).begin, seen_in(r + rows - 1, start).end};
            if (all.empty()) continue;
            OCTAVO_BY_ROWS(rows, dot_rows, work_.q + r * padded_, padded_, work_.pointers, all,
                           work_.weights + r * TILE, ahead(r, 0));
            for (int64_t i = r; i < r + rows; ++i) soften(i, start, seen_in(i, start), to);
        }
    }

    void scores_in_pairs(int64_t start, Partial to) {
        transpose_keys(work_.here, call_.head_size, {work_.next, 0, sizeof(K)}, work_.rows_copy);
        const int64_t passes = (num_rows_ + MAX_TILE - 1) / MAX_TILE;
        for (int64_t pass = 0; pass < passes; ++pass) {
            const int64_t r = num_rows_ * pass / passes, end = num_rows_ * (pass + 1) / passes;
            if (Range{seen_in(r, start).begin, seen_in(end - 1, start).end}.empty()) continue;
            score_rows_for(int(end - r))(work_.q + r * ROW, num_rows_ * ROW, padded_ / 2, work_.rows_copy,
                                         work_.weights + r * TILE);
            for (int64_t i = r; i < end; ++i) soften(i, start, seen_in(i, start), to);
        }
    }

    void soften(int64_t r, int64_t start, Range range, Partial to) {
        if (range.empty()) return;
        float* row = work_.weights + r * TILE;
        lanes16 s[2];
        lanes16 largest = lanes16::splat(-INFINITY);
        bool whole = range.end - range.begin == TILE;
        const float* slopes = call_.extras.alibi;
        const float slope = slopes == nullptr ? 0.0f : slopes[task_.head * group_ + r % group_];
        for (int h = 0; h < 2; ++h)
            for (int i = 0; i < lanes16::NV; ++i) {
                vf x = load(row + h * 16 + i * VL) * call_.scale;
                if (call_.soft_cap > 0) x = call_.soft_cap * vtanh(x / call_.soft_cap);
                if (slopes != nullptr) x = x + distances(start + h * 16 + i * VL - work_.positions[r]) * slope;
                if (!whole) x = visible(h * 16 + i * VL, range) ? x : splat(-INFINITY);
                s[h].v[i] = x;
                largest.v[i] = vmax(largest.v[i], x);
            }
        float before = to.max[r], now = std::max(before, reduce_max(largest));
        lanes16 sum = lanes16::load(work_.lane_sums + r * 16);
        if (now != before && before != -INFINITY) {  // else the factor is 1, or what it scales is 0
            float factor = vexp(before - now);
            for (int i = 0; i < lanes16::NV; ++i) sum.v[i] = sum.v[i] * factor;
            for (int64_t c = 0; c < padded_; c += VL)
                store(to.acc + r * padded_ + c, load(to.acc + r * padded_ + c) * factor);
        }
        to.max[r] = now;
        for (int i = 0; i < lanes16::NV; ++i) {
            for (int h = 0; h < 2; ++h) {
                vf x = vexp_weight(s[h].v[i] - now);
                if (!whole) x = visible(h * 16 + i * VL, range) ? x : vf{};
                if constexpr (PAIRS) x = as_float(bf16_bits(x) << 16);
                s[h].v[i] = x;
            }
            sum.v[i] = sum.v[i] + (s[0].v[i] + s[1].v[i]);
        }
        if constexpr (PAIRS) {
            for (int h = 0; h < 2; ++h) s[h].store(reinterpret_cast<bf16*>(row) + h * 16);
        } else {
            for (int h = 0; h < 2; ++h) s[h].store(row + h * 16);
        }
        sum.store(work_.lane_sums + r * 16);
    }

    static OCTAVO_INLINE vi visible(int32_t first, Range range) {
        vi lane;
        for (int i = 0; i < VL; ++i) lane[i] = i;
        lane += first;
        return (lane >= int32_t(range.begin)) & (lane < int32_t(range.end));
    }

    // first, first + 1, ... as floats
    static OCTAVO_INLINE vf distances(int64_t first) {
        vf lane;
        for (int i = 0; i < VL; ++i) lane[i] = float(first + i);
        return lane;
    }

    void values(int64_t start, Range tile, Partial to) {
        gather(tile, 1);
        for (int64_t r = 0; r < num_rows_; r += MICRO) {
            int64_t rows = std::min(num_rows_ - r, int64_t(MICRO));
            // Windows and causality move with the query, so the last row begins last and the first row ends first.
            Range common = {seen_in(r + rows - 1, start).begin, seen_in(r, start).end};
            if (common.empty()) {
                for (int64_t i = r; i < r + rows; ++i) weigh_one(i, seen_in(i, start), to);
                continue;
            }
            for (int64_t i = r; i < r + rows; ++i) weigh_one(i, {seen_in(i, start).begin, common.begin}, to);
            OCTAVO_BY_ROWS(rows, weigh_rows, to.acc + r * padded_, padded_, work_.weights + r * TILE, work_.pointers,
                           common, ahead(r, 1));
            for (int64_t i = r; i < r + rows; ++i) weigh_one(i, {common.end, seen_in(i, start).end}, to);
        }
    }
    void weigh_one(int64_t r, Range range, Partial to) {
        if (range.empty()) return;
        weigh_rows<1>(to.acc + r * padded_, padded_, work_.weights + r * TILE, work_.pointers, range, Ahead{});
    }

    void values_in_pairs(int64_t start, Partial to) {
        const int64_t value_bytes = call_.value_start() * sizeof(K);
        pair_values(work_.here, value_bytes, call_.out_size(), padded_, {work_.next, value_bytes, sizeof(K)},
                    work_.rows_copy);
        for (int64_t r = 0; r < num_rows_; r += VALUE_ROWS) {
            const int64_t rows = std::min(num_rows_ - r, int64_t(VALUE_ROWS));
            // Of the tokens that all rows see, the whole pairs; see `values`.
            Range common = {(seen_in(r + rows - 1, start).begin + 1) / 2 * 2, seen_in(r, start).end / 2 * 2};
            if (common.empty()) {
                for (int64_t i = r; i < r + rows; ++i) weigh_alone(i, seen_in(i, start), to);
                continue;
            }
            for (int64_t i = r; i < r + rows; ++i) weigh_alone(i, {seen_in(i, start).begin, common.begin}, to);
            weigh_pairs_for(int(rows))(to.acc + r * padded_, padded_, work_.weights + r * TILE, work_.rows_copy,
                                       common.begin / 2, common.end / 2);
            for (int64_t i = r; i < r + rows; ++i) weigh_alone(i, {common.end, seen_in(i, start).end}, to);
        }
    }
    void weigh_alone(int64_t r, Range range, Partial to) {
        weigh_range(to.acc + r * padded_, padded_, work_.weights + r * TILE, work_.rows_copy, range);
    }

    const Call& call_;
    const Task& task_;
    Work& work_;
    int64_t padded_, group_, num_rows_;
};

// ---- tasks -------------------------------------------------------------------------------------------------------

// to = to followed by next: the one formula by which leaves are joined.
void fold(Partial to, Partial next, int64_t num_rows, int64_t padded) {
    for (int64_t r = 0; r < num_rows; ++r) {
        if (next.sum[r] == 0.0f) continue;  // saw nothing
        float *a = to.acc + r * padded, *b = next.acc + r * padded;
        if (to.sum[r] == 0.0f) {
            std::copy(b, b + padded, a);
            to.max[r] = next.max[r], to.sum[r] = next.sum[r];
            continue;
        }
        float largest = std::max(to.max[r], next.max[r]);
        float old_factor = vexp(to.max[r] - largest), new_factor = vexp(next.max[r] - largest);
        for (int64_t c = 0; c < padded; c += VL)
            store(a + c, fma(load(a + c), splat(old_factor), load(b + c) * new_factor));
        to.sum[r] = fma(to.sum[r], old_factor, next.sum[r] * new_factor);
        to.max[r] = largest;
    }
}

template <class T>
void write_out(const Call& call, const Task& task, Partial from) {
    int64_t padded = call.padded(), group = call.group(), token = call.query_start[task.row] + task.first_query;
    for (int64_t r = 0; r < task.num_queries * group; ++r) {
        T* out = static_cast<T*>(call.out) + (token + r / group) * call.out_token +
                 (task.head * group + r % group) * call.out_head;
        float sum = from.sum[r] == 0.0f ? 1.0f : from.sum[r];  // a padding row sees nothing and gets zeros
        float factor = 1.0f;
        if (call.extras.sinks != nullptr && from.sum[r] != 0.0f) {
            float sink = call.extras.sinks[task.head * group + r % group], largest = std::max(from.max[r], sink);
            factor = vexp(from.max[r] - largest);
            sum = fma(sum, factor, vexp(sink - largest));
        }
        for (int64_t c = 0; c < call.out_size(); c += VL) {
            vf x = load(from.acc + r * padded + c) * factor / sum;
            if (c + VL <= call.out_size()) store(out + c, x);
            else store_first(out + c, x, call.out_size() - c);
        }
    }
}

template <class T, bool PAIRS>
void load_queries(const Call& call, const Task& task, float* to) {
    int64_t padded = call.padded(), group = call.group(), token = call.query_start[task.row] + task.first_query;
    const int64_t rows = task.num_queries * group;
    for (int64_t r = 0; r < rows; ++r) {
        const T* q = static_cast<const T*>(call.q) + (token + r / group) * call.q_token +
                     (task.head * group + r % group) * call.q_head;
        if constexpr (PAIRS) {
            for (int64_t c = 0; c < padded; c += 2 * KC) {
                const int64_t width = std::min(padded - c, int64_t(2 * KC)), count = std::min(call.head_size - c, width);
                char* words = reinterpret_cast<char*>(to + c / (2 * KC) * rows * ROW + r * ROW);
                std::memcpy(words, q + c, count * sizeof(T));
                std::memset(words + count * sizeof(T), 0, (width - count) * sizeof(T));
            }
            continue;
        }
        for (int64_t c = 0; c < padded; c += VL) {
            int64_t left = call.head_size - c;
            store(to + r * padded + c, left >= VL ? load(q + c) : load_first(q + c, std::max(left, int64_t(0))));
        }
    }
}

Work make_work(const Call& call, int64_t rows) {
    static thread_local Scratch scratch;
    int64_t padded = call.padded(), partial = Partial::size(rows, padded);
    const int64_t queries = call.extras.in_pairs ? query_floats(rows, padded / 2) : rows * padded;
    const int64_t tile = TILE * (padded + 16);
    float* base = scratch.floats(queries + rows * TILE + tile + rows * 17 + 2 * partial);
    Work work;
    work.q = base;
    work.weights = work.q + queries;
    work.rows_copy = work.weights + rows * TILE;
    work.lane_sums = work.rows_copy + tile;
    work.running = work.lane_sums + rows * 16;
    work.leaf = work.running + partial;
    std::fill(work.next, work.next + TILE, reinterpret_cast<const char*>(base));
    work.positions = reinterpret_cast<int32_t*>(work.leaf + partial);
    return work;
}

template <class T, class K, bool PAIRS>
void run_whole(const Call& call, const Task& task) {
    int64_t rows = task.num_queries * call.group(), padded = call.padded();
    Work work = make_work(call, rows);
    load_queries<T, PAIRS>(call, task, work.q);
    Leaf<T, K, PAIRS> leaf(call, task, work);
    Partial running = Partial::at(work.running, rows, padded), next = Partial::at(work.leaf, rows, padded);
    leaf.run(task.first_leaf, running);
    for (int64_t i = 1; i < task.num_leaves; ++i) {
        leaf.run(task.first_leaf + i, next);
        fold(running, next, rows, padded);
    }
    write_out<T>(call, task, running);
}

// (task, leaf) pairs of split tasks; leaf -1 stands for a whole task.
struct Step {
    int64_t task, leaf;
};

template <class T, class K, bool PAIRS = false>
void paged_attention(const Call& call) {
    AttentionPlan plan(call);
    std::vector<Step> steps;
    std::vector<int64_t> split;
    int64_t padded = call.padded(), workspace = 0;
    for (int64_t i = 0; i < int64_t(plan.tasks.size()); ++i) {
        Task& task = plan.tasks[i];
        if (!plan.splits(task)) continue;
        task.slot = workspace;
        workspace += task.num_leaves * Partial::size(task.num_queries * call.group(), padded);
        split.push_back(i);
        for (int64_t leaf = 0; leaf < task.num_leaves; ++leaf) steps.push_back({i, leaf});
    }
    for (int64_t i = 0; i < int64_t(plan.tasks.size()); ++i)
        if (plan.tasks[i].slot < 0) steps.push_back({i, -1});
    static thread_local Scratch scratch;
    float* partials = scratch.floats(workspace);
    auto partial = [&](const Task& task, int64_t leaf) {
        int64_t rows = task.num_queries * call.group();
        return Partial::at(partials + task.slot + leaf * Partial::size(rows, padded), rows, padded);
    };
    parallel_tasks(plan.threads, steps.size(), [&](int64_t s) {
        const Task& task = plan.tasks[steps[s].task];
        if (steps[s].leaf < 0) return run_whole<T, K, PAIRS>(call, task);
        Work work = make_work(call, task.num_queries * call.group());
        load_queries<T, PAIRS>(call, task, work.q);
        Leaf<T, K, PAIRS>(call, task, work).run(task.first_leaf + steps[s].leaf, partial(task, steps[s].leaf));
    });
    parallel_tasks(plan.threads, split.size(), [&](int64_t s) {
        const Task& task = plan.tasks[split[s]];
        for (int64_t leaf = 1; leaf < task.num_leaves; ++leaf)
            fold(partial(task, 0), partial(task, leaf), task.num_queries * call.group(), padded);
        write_out<T>(call, task, partial(task, 0));
    });
}

template <class T>
void over_cache(const Call& call) {
    if (call.extras.kv_dtype == FP8) paged_attention<T, fp8>(call);
    else if (call.extras.kv_dtype == INT8) paged_attention<T, int8_t>(call);
    else if (call.extras.in_pairs) paged_attention<bf16, bf16, true>(call);
    else if (call.extras.kv_dtype == BF16) paged_attention<T, bf16>(call);
    else paged_attention<T, T>(call);
}

}  // namespace
}  // namespace octavo

OCTAVO_API void octavo_paged_attention(
    const void* q, void* out, const void* kv, const int32_t* query_start, const int32_t* seq_lens,
    const int32_t* block_table, int64_t q_token, int64_t q_head, int64_t out_token, int64_t out_head, int64_t kv_block,
    int64_t kv_head, int64_t kv_token, int64_t table_row, int64_t num_rows, int64_t num_heads, int64_t num_kv_heads,
    int64_t head_size, int64_t block_size, int64_t window, int64_t value_size, float scale, float soft_cap,
    const octavo::AttentionExtras* extras, int32_t dtype) {
    octavo::AttentionCall call = {q,        out,      kv,       query_start, seq_lens,  block_table,  q_token,   q_head,
                         out_token, out_head, kv_block, kv_head,     kv_token,  table_row,    num_rows,  num_heads,
                         num_kv_heads, head_size, block_size, window, value_size, scale, soft_cap,
                         extras != nullptr ? *extras : octavo::AttentionExtras{0, nullptr, nullptr, nullptr, nullptr, 1, dtype, 0}};
    call.extras.in_pairs &= dtype == octavo::BF16 && call.extras.kv_dtype == octavo::BF16;
    if (dtype == octavo::F32) octavo::over_cache<float>(call);
    else octavo::over_cache<octavo::bf16>(call);
}
