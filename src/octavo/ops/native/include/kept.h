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
    T bits[VL];
    store(bits, x);
    return load(bits);
}

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
        for (int64_t done = 0; done < count;) {
            const int64_t left = run - (first + done) % run, n = left < count - done ? left : count - done;
            const char* from = place(table, entry, 0, first + done);
            if (from) body(reinterpret_cast<const float*>(from), done, n);
            done += n;
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
    template <class Body>
    void each(const int32_t* table, int64_t entry, int64_t offset, int64_t first, int64_t count, Body body) const {
        for (int64_t done = 0; done < count;) {
            const int64_t line = (first + done) / line_size, skip = (first + done) % line_size;
            const int64_t n = line_size - skip < count - done ? line_size - skip : count - done;
            if (char* at = place(table, entry, offset, line)) body(at, skip, done, n);
            done += n;
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
    void write(const Kept& kept, int64_t position, int64_t first, int64_t count, const float* values) const {
        kept.write(inputs, position / block_size, position % block_size, first, count, values);
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
                else if (kept.dtype == F32) widen(reinterpret_cast<const float*>(from) + skip, out, count);
                else widen(reinterpret_cast<const bf16*>(from) + skip, out, count);
            }
            begin += n;
        }
    }
    // The state behind `border` tokens: elements [first, first + count); zeros at 0.
    void read_state(const Kept& kept, int64_t border, int64_t first, int64_t count, float* out) const {
        if (border) kept.read(states, border / chunk - 1, 0, first, count, out);
        else std::memset(out, 0, 4 * count);
    }
    void write_state(const Kept& kept, int64_t border, int64_t first, int64_t count, const float* values) const {
        kept.write(states, border / chunk - 1, 0, first, count, values);
    }
};

}  // namespace octavo
