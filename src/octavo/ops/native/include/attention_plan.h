// A call of attention, and how it is cut into tasks. No cut enters a result.
#pragma once

#include <algorithm>
#include <vector>

#include "attention_rows.h"
#include "operators.h"

namespace octavo {

constexpr int LEAF = 512;  // octavo.ops.attention.LEAF
constexpr int MAX_ROWS = 64;
constexpr int64_t GRAIN = 1 << 18;  // work units (multiply-adds) worth a thread

// One call of the operator (attention.cpp).
struct AttentionCall {
    const void* q;
    void* out;
    const void* kv;
    const int32_t *query_start, *seq_lens, *block_table;
    int64_t q_token, q_head, out_token, out_head;     // strides, elements
    int64_t kv_block, kv_head, kv_token, table_row;   // strides, elements
    int64_t num_rows, num_heads, num_kv_heads, head_size, block_size, window;
    int64_t value_size;  // latent: V is K's first channels; 0: V, of head_size, stands behind K
    float scale, soft_cap;
    AttentionExtras extras;

    // The keys that a query at `position` of a row sees.
    Range seen(int64_t row, int64_t position) const {
        int64_t begin = window > 0 ? std::max(position - window + 1, int64_t(0)) : 0;
        if (extras.chunk > 0) begin = std::max(begin, position / extras.chunk * extras.chunk);
        if (extras.causal) return {begin, position + 1};
        int64_t end = seq_lens[row];
        if (window > 0) end = std::min(end, position + window);
        if (extras.chunk > 0) end = std::min(end, (position / extras.chunk + 1) * extras.chunk);
        return {begin, end};
    }
    // The largest range that a task's queries see together.
    Range seen_by(int64_t row, int64_t first, int64_t count) const {
        return {seen(row, first).begin, seen(row, first + count - 1).end};
    }
    int64_t value_start() const { return value_size > 0 ? 0 : head_size; }
    int64_t out_size() const { return value_size > 0 ? value_size : head_size; }
    int64_t group() const { return num_heads / num_kv_heads; }
    int64_t padded() const { return (head_size + 15) / 16 * 16; }
};

// Query rows that one thread computes, of one row and KV head.
struct AttentionTask {
    int64_t row, head, first_query, num_queries;
    int64_t position;                // of the first query
    int64_t first_leaf, num_leaves;  // that the task covers
    int64_t slot;                    // split tasks: the first of its partials in the workspace; else -1
};

// The call's tasks, the expensive ends of long prompts first.
class AttentionPlan {
  public:
    std::vector<AttentionTask> tasks;
    int threads;

    explicit AttentionPlan(const AttentionCall& call) : call_(call) {
        int64_t most = std::max(MAX_ROWS / call.group(), int64_t(1)), total = 0;
        for (int64_t row = 0; row < call.num_rows; ++row) {
            int64_t queries = call.query_start[row + 1] - call.query_start[row];
            for (int64_t last = (queries + most - 1) / most - 1; last >= 0; --last) {
                AttentionTask task = {row, 0, last * most, std::min(most, queries - last * most), 0, 0, 0, -1};
                task.position = call.seq_lens[row] - queries + task.first_query;
                Range seen = call.seen_by(row, task.position, task.num_queries);
                task.first_leaf = seen.begin / LEAF;
                task.num_leaves = (std::max(seen.end, int64_t(1)) - 1) / LEAF - task.first_leaf + 1;
                total += cost(task) * call.num_kv_heads;
                for (task.head = 0; task.head < call.num_kv_heads; ++task.head) tasks.push_back(task);
            }
        }
        threads = threads_for(total, GRAIN);
        share_ = total / (4 * threads);
    }

    // A task too large to balance: its leaves become tasks of their own.
    bool splits(const AttentionTask& task) const { return threads > 1 && task.num_leaves > 1 && cost(task) > share_; }

  private:
    int64_t cost(const AttentionTask& task) const {
        Range seen = call_.seen_by(task.row, task.position, task.num_queries);
        return (seen.end - seen.begin) * (task.num_queries * call_.group() + 4) * call_.padded();
    }
    const AttentionCall& call_;
    int64_t share_;
};

}  // namespace octavo
