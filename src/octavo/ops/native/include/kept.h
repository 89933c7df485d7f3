// What layers with states keep in blocks, found by block table, and a step's rows as their operators see them.
//
// An item (a state, or what one token brings) is cut into lines of equal length, and lines into parts, as
// octavo.cache.parts tells; octavo.ops.states.Store.places is the same arithmetic. Invariant: the null block, which stands
// where a table keeps nothing, is neither read nor written.
#pragma once

#include "vec.h"

namespace octavo {

// out[i] = in[i] as float, and back, rounded once.
template <class T>
OCTAVO_INLINE void widen(const T* in, float* out, int64_t n) {
    int64_t i = 0;
    for (; i + VL <= n; i += VL) store(out + i, load(in + i));
    if (i < n) store_first(out + i, load_first(in + i, n - i), n - i);
}
template <class T>
OCTAVO_INLINE void narrow(const float* in, T* out, int64_t n) {
    int64_t i = 0;
    for (; i + VL <= n; i += VL) store(out + i, load(in + i));
    if (i < n) store_first(out + i, load_first(in + i, n - i), n - i);
}
// x as an element of type T has it.
template <class T>
OCTAVO_INLINE vf rounded(vf x) {
    if constexpr (sizeof(T) == 4) return x;
    else return as_float(bf16_bits(x) << 16);
}

// A processor waits for more lines at once that go to its L2 than for those that go to L1.
constexpr int TO_L2 = 2;

// Asks for the cache lines of `bytes` at `at`.
OCTAVO_INLINE void fetch_lines(const char* at, int64_t bytes) {
    for (int64_t done = 0; done < bytes; done += 64) __builtin_prefetch(at + done, 0, TO_L2);
    if (bytes) __builtin_prefetch(at + bytes - 1, 0, TO_L2);
}

// Pieces of memory that the next task reads, asked for line by line while this one computes: rows' states and inputs
// lie anywhere in the cache, and a burst of requests would stall the loads behind it.
class FetchList {
  public:
    // What does not fit is read when it is needed.
    void add(const void* from, int64_t bytes) {
        const uintptr_t at = reinterpret_cast<uintptr_t>(from), begin = at / 64 * 64, end = at + bytes;
        if (count_ == MOST || (count_ && begin + 64 == ends_[count_ - 1] && end <= begin + 64)) return;
        begins_[count_] = begin, ends_[count_++] = (end + 63) / 64 * 64;
        lines_ += (end - begin + 63) / 64;
    }
    // Divides them over `steps`.
    void begin(int64_t steps) { each_ = lines_ / steps + 1; }
    OCTAVO_INLINE void step() {
        for (int64_t i = 0; i < each_; ++i, at_ += 64) {
            if (at_ == end_) {
                if (next_ == count_) return;
                at_ = begins_[next_], end_ = ends_[next_++];
            }
            __builtin_prefetch(reinterpret_cast<const char*>(at_), 0, TO_L2);
        }
    }

  private:
    static constexpr int MOST = 256;
    uintptr_t begins_[MOST], ends_[MOST];
    uintptr_t at_ = 0, end_ = 0;
    int64_t lines_ = 0, each_ = 0;
    int count_ = 0, next_ = 0;
};

// One tensor of what a layer keeps; octavo.states.cpu._Kept.
struct Kept {
    char* data;
    int64_t block_bytes, part_bytes, line_bytes;
    int64_t run, lines, line_size;  // lines of a part, of an item; elements of a line
    int64_t first_part, per_block, blocks;
    int32_t dtype;

    // Where line `line` of an item begins; null where nothing is kept. table: of the item's row.
    char* place(const int32_t* table, int64_t entry, int64_t offset, int64_t line) const {
        const int64_t at = offset * lines + line, part = first_part + at / run;
        const int64_t block = table[entry * blocks + part / per_block];
        return block ? data + block * block_bytes + part % per_block * part_bytes + at % run * line_bytes : nullptr;
    }
    // Elements [first, first + count) of an item.
    void read(const int32_t* table, int64_t entry, int64_t offset, int64_t first, int64_t count, float* out) const {
        each(table, entry, offset, first, count, [&](char* at, int64_t skip, int64_t done, int64_t n) {
            if (dtype == F32) widen(reinterpret_cast<const float*>(at) + skip, out + done, n);
            else widen(reinterpret_cast<const bf16*>(at) + skip, out + done, n);
        });
    }
    void write(const int32_t* table, int64_t entry, int64_t offset, int64_t first, int64_t count,
               const float* values) const {
        each(table, entry, offset, first, count, [&](char* at, int64_t skip, int64_t done, int64_t n) {
            if (dtype == F32) narrow(values + done, reinterpret_cast<float*>(at) + skip, n);
            else narrow(values + done, reinterpret_cast<bf16*>(at) + skip, n);
        });
    }
    // The same, and asks for as many elements behind them: the next task reads those, and they lie there.
    void read_on(const int32_t* table, int64_t entry, int64_t offset, int64_t first, int64_t count, float* out) const {
        const int64_t size = dtype == F32 ? 4 : 2;
        each(table, entry, offset, first, count, [&](const char* at, int64_t skip, int64_t done, int64_t n) {
            fetch_lines(at + (skip + n) * size, n * size);
            if (dtype == F32) widen(reinterpret_cast<const float*>(at) + skip, out + done, n);
            else widen(reinterpret_cast<const bf16*>(at) + skip, out + done, n);
        });
    }
    // Asks for the cache lines of elements [first, first + count) of an item, long before they are read.
    void fetch(const int32_t* table, int64_t entry, int64_t offset, int64_t first, int64_t count) const {
        const int64_t size = dtype == F32 ? 4 : 2;
        each(table, entry, offset, first, count, [&](const char* at, int64_t skip, int64_t, int64_t n) {
            fetch_lines(at + skip * size, n * size);
        });
    }
    // The same, in its turn.
    void tell(FetchList& list, const int32_t* table, int64_t entry, int64_t first, int64_t count) const {
        const int64_t size = dtype == F32 ? 4 : 2;
        each(table, entry, 0, first, count, [&](const char* at, int64_t skip, int64_t, int64_t n) {
            list.add(at + skip * size, n * size);
        });
    }
    // Element `index` of an item.
    void put(const int32_t* table, int64_t entry, int64_t offset, int64_t index, float value) const {
        char* at = place(table, entry, offset, index / line_size);
        if (!at) return;
        const int64_t skip = index % line_size;
        if (dtype == F32) reinterpret_cast<float*>(at)[skip] = value;
        else reinterpret_cast<bf16*>(at)[skip] = to_bf16(value);
    }
    // The elements themselves, if they lie together as float32.
    const float* direct(const int32_t* table, int64_t entry, int64_t first, int64_t count) const {
        if (dtype != F32 || first % line_size + count > line_size) return nullptr;
        const char* at = place(table, entry, 0, first / line_size);
        return at ? reinterpret_cast<const float*>(at) + first % line_size : nullptr;
    }
    // Whether rows of `size` elements can be read where they lie, by each_run.
    bool has_rows(int64_t size) const { return dtype == F32 && line_size == size; }
    // Lines [first, first + count) of a float32 item where they lie: body(the first, which it is of them, how many
    // follow each other, line_bytes apart).
    template <class Body>
    void each_run(const int32_t* table, int64_t entry, int64_t first, int64_t count, Body body) const {
        const int64_t part = first_part + first / run;
        int64_t block = part / per_block, slot = part % per_block, line = first % run;
        for (int64_t done = 0; done < count; line = 0) {
            const int64_t n = run - line < count - done ? run - line : count - done;
            const int64_t id = table[entry * blocks + block];
            const char* from = data + id * block_bytes + slot * part_bytes + line * line_bytes;
            if (id) body(reinterpret_cast<const float*>(from), done, n);
            done += n;
            if (++slot == per_block) slot = 0, ++block;
        }
    }
    // Rounded as they are kept.
    void round(float* values, int64_t count) const {
        if (dtype == F32) return;
        for (int64_t i = 0; i < count; i += VL) {
            const int64_t n = count - i < VL ? count - i : VL;
            store_first(values + i, rounded<bf16>(load_first(values + i, n)), n);
        }
    }

  private:
    // body(where a line begins, elements to skip, which one follows, how many): lines of a part lie behind each other.
    template <class Body>
    void each(const int32_t* table, int64_t entry, int64_t offset, int64_t first, int64_t count, Body body) const {
        int64_t at = offset * lines + first / line_size, skip = first % line_size;
        for (int64_t done = 0; done < count; skip = 0) {
            const int64_t part = first_part + at / run, line = at % run, rest = (run - line) * line_size - skip;
            const int64_t n = rest < count - done ? rest : count - done;
            const int64_t block = table[entry * blocks + part / per_block], slot = part % per_block;
            if (block) body(data + block * block_bytes + slot * part_bytes + line * line_bytes, skip, done, n);
            done += n;
            at += run - line;
        }
    }
};

// A step's rows; octavo.states.cpu._Step.
struct StateStep {
    const int64_t* rows;  // of the tables
    const int32_t *query_start, *seq_lens;
    int64_t num_rows, num_tokens;
};

// Where a layer's tables are; octavo.states.cpu._Tables.
struct StateTables {
    const int32_t *states, *inputs;
    int64_t state_columns, input_columns;
    int64_t chunk, block_size;  // tokens of a chunk, of an entry of inputs
};

// One row of a step.
struct StateRow {
    const int32_t *states, *inputs;  // its tables
    int64_t first;                   // its first token of the step
    int64_t computed, end;           // positions: of that token, behind its last one
    int64_t chunk, block_size;

    StateRow(const StateStep& step, const StateTables& tables, int64_t row)
        : states(tables.states + step.rows[row] * tables.state_columns),
          inputs(tables.inputs + step.rows[row] * tables.input_columns),
          first(step.query_start[row]),
          end(step.seq_lens[row]),
          chunk(tables.chunk),
          block_size(tables.block_size) {
        computed = end - (step.query_start[row + 1] - first);
    }
    int64_t border() const { return computed / chunk * chunk; }
    // Of what the token at `position` brings.
    void put(const Kept& kept, int64_t position, int64_t index, float value) const {
        kept.put(inputs, position / block_size, position % block_size, index, value);
    }
    void read(const Kept& kept, int64_t position, int64_t first, int64_t count, float* out) const {
        kept.read(inputs, position / block_size, position % block_size, first, count, out);
    }
    void read_on(const Kept& kept, int64_t position, int64_t first, int64_t count, float* out) const {
        kept.read_on(inputs, position / block_size, position % block_size, first, count, out);
    }
    void write(const Kept& kept, int64_t position, int64_t first, int64_t count, const float* values) const {
        kept.write(inputs, position / block_size, position % block_size, first, count, values);
    }
    void fetch(const Kept& kept, int64_t position, int64_t first, int64_t count) const {
        kept.fetch(inputs, position / block_size, position % block_size, first, count);
    }
    // Elements [first, first + count) of what the tokens at `begin` to `end` - 1 brought, to rows of `out`.
    void read_tokens(const Kept& kept, int64_t begin, int64_t end, int64_t first, int64_t count, float* out,
                     int64_t out_row) const {
        const int64_t line = first / kept.line_size, skip = first % kept.line_size;
        if (skip + count > kept.line_size || kept.lines > kept.run) {  // cut into several lines
            for (int64_t t = begin; t < end; ++t) read(kept, t, first, count, out + (t - begin) * out_row);
            return;
        }
        while (begin < end) {  // of one part: tokens lie equally far apart
            const int64_t offset = begin % block_size, at = (offset * kept.lines + line) % kept.run;
            int64_t n = (kept.run - 1 - at) / kept.lines + 1;
            if (n > block_size - offset) n = block_size - offset;
            if (n > end - begin) n = end - begin;
            const char* from = kept.place(inputs, begin / block_size, offset, line);
            if (!from) return;  // the open chunk of a row is kept
            for (int64_t t = 0; t < n; ++t, from += kept.lines * kept.line_bytes, out += out_row) {
                if (count == 1) *out = kept.dtype == F32 ? reinterpret_cast<const float*>(from)[skip]
                                                         : to_float(reinterpret_cast<const bf16*>(from)[skip]);
                else {  // the next head's lie behind these: they are asked for
                    const int64_t size = kept.dtype == F32 ? 4 : 2;
                    fetch_lines(from + (skip + count) * size, count * size);
                    if (kept.dtype == F32) widen(reinterpret_cast<const float*>(from) + skip, out, count);
                    else widen(reinterpret_cast<const bf16*>(from) + skip, out, count);
                }
            }
            begin += n;
        }
    }
    // The state behind `border` tokens: elements [first, first + count); zeros at 0.
    void read_state(const Kept& kept, int64_t border, int64_t first, int64_t count, float* out) const {
        if (border) kept.read(states, border / chunk - 1, 0, first, count, out);
        else std::memset(out, 0, 4 * count);
    }
    void read_state_on(const Kept& kept, int64_t border, int64_t first, int64_t count, float* out) const {
        if (border) kept.read_on(states, border / chunk - 1, 0, first, count, out);
        else std::memset(out, 0, 4 * count);
    }
    void write_state(const Kept& kept, int64_t border, int64_t first, int64_t count, const float* values) const {
        kept.write(states, border / chunk - 1, 0, first, count, values);
    }
};

// Where tokens of an open chunk lie, found once for all tensors that are cut alike: a line a token.
class TokenPlaces {
  public:
    // memory: two numbers a token of a chunk.
    TokenPlaces(const Kept& like, int64_t* memory) : like_(like), parts_(memory) {}

    static bool serves(const Kept& like, const Kept& other) {
        return like.lines == 1 && other.lines == 1 && like.run == other.run && like.first_part == other.first_part &&
               like.per_block == other.per_block && like.blocks == other.blocks &&
               like.block_bytes == other.block_bytes && like.part_bytes == other.part_bytes;
    }
    // Tokens [begin, begin + count) of a row.
    void find(const StateRow& row, int64_t begin, int64_t count) {
        int64_t entry = begin / row.block_size, offset = begin % row.block_size;
        for (int64_t t = 0; t < count; ++entry, offset = 0) {
            const int64_t part = like_.first_part + offset / like_.run;
            int64_t block = part / like_.per_block, slot = part % like_.per_block, line = offset % like_.run;
            for (; t < count && offset < row.block_size; ++t, ++offset) {
                const int64_t id = row.inputs[entry * like_.blocks + block];
                parts_[2 * t] = id ? id * like_.block_bytes + slot * like_.part_bytes : -1;
                parts_[2 * t + 1] = line;
                if (++line < like_.run) continue;
                line = 0;
                if (++slot == like_.per_block) slot = 0, ++block;
            }
        }
    }
    // Element `index` of token `t`; null where nothing is kept.
    char* at(const Kept& kept, int64_t t, int64_t index) const {
        if (parts_[2 * t] < 0) return nullptr;
        char* line = kept.data + parts_[2 * t] + parts_[2 * t + 1] * kept.line_bytes;
        return line + index * (kept.dtype == F32 ? 4 : 2);
    }
    void tell(FetchList& list, const Kept& kept, int64_t t, int64_t first, int64_t size) const {
        if (const char* from = at(kept, t, first)) list.add(from, size * (kept.dtype == F32 ? 4 : 2));
    }
    void read(const Kept& kept, int64_t count, int64_t first, int64_t size, float* out, int64_t out_row) const {
        for (int64_t t = 0; t < count; ++t, out += out_row) {
            const char* from = at(kept, t, first);
            if (!from) continue;  // the open chunk of a row is kept
            if (kept.dtype == F32) widen(reinterpret_cast<const float*>(from), out, size);
            else widen(reinterpret_cast<const bf16*>(from), out, size);
        }
    }
    // One element of each.
    void read(const Kept& kept, int64_t count, int64_t index, float* out) const {
        for (int64_t t = 0; t < count; ++t) {
            const char* from = at(kept, t, index);
            if (!from) continue;
            out[t] = kept.dtype == F32 ? *reinterpret_cast<const float*>(from)
                                       : to_float(*reinterpret_cast<const bf16*>(from));
        }
    }
    void put(const Kept& kept, int64_t t, int64_t index, float value) const {
        char* to = at(kept, t, index);
        if (!to) return;
        if (kept.dtype == F32) *reinterpret_cast<float*>(to) = value;
        else *reinterpret_cast<bf16*>(to) = to_bf16(value);
    }
    void write(const Kept& kept, int64_t t, int64_t first, int64_t size, const float* values) const {
        char* to = at(kept, t, first);
        if (!to) return;
        if (kept.dtype == F32) narrow(values, reinterpret_cast<float*>(to), size);
        else narrow(values, reinterpret_cast<bf16*>(to), size);
    }

  private:
    const Kept& like_;
    int64_t* parts_;
};

}  // namespace octavo
