// Mamba-2 over prompts: chunks walked one behind the other. Told of and launched by mamba2_prompts.py.
//
// A task is a head of a row; a block takes one task after the other. Two warp groups have 64 of the states each, [states,
// channels] in registers, and put what products and the cache take of them into a ring in shared memory, ahead of each
// chunk: the upper halves of 128 states, then what is left. Two others make results, of a chunk in turn. Four warps help:
// one asks for chunks, one sends states by the copy engine, two write what the row leaves of its last chunks.
//
// Invariant: the operations on a head are those of `mamba2_walk`, in the same order.

struct Told {
    Map states;  // what is kept of them, as lines of 64 numbers of 16 bits
    Map given;   // x, B and C of tokens
    const u16* xbc;
    const float *total, *dt, *skip;  // [T, HEADS], but skip
    u16* out;
    const i64* rows;
    const int *query_start, *seq_lens, *num_ahead, *state_table, *input_table;
    u64 state, x_kept, b_kept;
    i64 xbc_row;
    int state_columns, input_columns, state_first, input_first, num_rows;
};

#define SIZE 64
#define STATES 128
#define THREADS (384 + RESULT_GROUPS * 128)
#define TILE (CHUNK * 128)  // 64 lines of 64 numbers
#define HALF_BYTES (SIZE * STATES * 2)
// In shared memory: chunks that are on their way or used; the ring of states; results of a warp group; weights of tokens
// of a warp; tasks; barriers. Of a chunk: C and B, two tiles each, x, its sums and steps.
#define C_AT 0
#define B_AT (2 * TILE)
#define X_AT (4 * TILE)
#define SUMS_AT (X_AT + TILE)
#define STEPS_AT (SUMS_AT + CHUNK * 4)
#define STAGE (SUMS_AT + 1024)
#define RING_AT (STAGES * STAGE)
#define RESULTS_AT (RING_AT + RING * 2 * HALF_BYTES)
#define WEIGHTS_AT (RESULTS_AT + RESULT_GROUPS * TILE)
#define TASKS_AT (WEIGHTS_AT + 8 * CHUNK * 4)
#define TASK 64
#define BARRIERS_AT (TASKS_AT + 2 * TASK)
#define FULL BARRIERS_AT               // of each stage
#define EMPTY (FULL + STAGES * 8)      // of each stage
#define STAGED (EMPTY + STAGES * 8)    // of each place in the ring: a state is there
#define FREE (STAGED + RING * 8)       // of each place in the ring
#define FOUND (FREE + RING * 8)        // of each task
#define DONE (FOUND + 16)              // of each task
#define STATE_WARPS 8
#define RESULT_WARPS 4  // of a warp group
#define KEEPERS 2

// A task: a head of a row; where the row's tables begin. end 0: there is none.
struct Walk {
    int token, end, computed, head;
    u64 states, inputs;
};
__device__ inline Walk walk_of(u32 base, u32 task) {
    u32 at = base + TASKS_AT + task % 2 * TASK;
    wait_for(base + FOUND + task % 2 * 8, task / 2 & 1);
    Walk walk;
    walk.token = get(at), walk.end = get(at + 4), walk.computed = get(at + 8), walk.head = get(at + 12);
    walk.states = address_at(at + 16), walk.inputs = address_at(at + 24);
    return walk;
}
// Told by a warp, once all its lanes have come.
__device__ inline void tell(u32 barrier) {
    u32 lane = thread() % 32;
    warp_together();
    if (lane == 0) arrive(barrier);
}

// The first task from `task` on that there is something to do for, `task` then being the one behind it.
__device__ inline Walk find(const Told& told, int& task) {
    int ahead = *told.num_ahead, tasks = max(told.num_rows - ahead, 0) * HEADS;
    Walk walk{0, 0, 0, 0, 0, 0};
    while (task < tasks) {
        int row = ahead + task / HEADS;
        walk.head = task % HEADS;
        task += blocks();
        walk.token = told.query_start[row], walk.end = told.seq_lens[row];
        walk.computed = walk.end - (told.query_start[row + 1] - walk.token);
        if (walk.computed < walk.end && walk.computed >= 0 && walk.computed % CHUNK == 0) {
            walk.states = (u64)(told.state_table + told.rows[row] * told.state_columns);
            walk.inputs = (u64)(told.input_table + told.rows[row] * told.input_columns);
            return walk;
        }
    }
    walk.end = 0;
    return walk;
}

// Ask for a chunk, of which `left` tokens are there; for others the last one stands. All lanes of a warp.
__device__ inline void ask(const Told& told, const Walk& walk, int begin, u32 own, u32 full) {
    u32 lane = thread() % 32;
    int left = walk.end - begin;
    i64 token = walk.token + begin - walk.computed;
    constexpr int columns = HEADS * SIZE;
    int column_b = columns + walk.head / PER * STATES, column_c = column_b + GROUPS * STATES;
#pragma unroll
    for (u32 i = 0; i < CHUNK / 32; ++i) {
        u32 place = lane + i * 32;
        i64 at = (token + min(place, left - 1)) * HEADS + walk.head;
        copy4(own + SUMS_AT + place * 4, (u64)(told.total + at), 4);
        copy4(own + STEPS_AT + place * 4, (u64)(told.dt + at), 4);
    }
    if (left >= CHUNK) {
        if (lane == 0) {
            u64 base = (u64)told.xbc;
            expect(full, 5 * TILE);
#pragma unroll
            for (int half = 0; half < 2; ++half)
                fetch_tile(told.given, base, told.xbc_row * 2, column_b + half * 64, (int)token, own + B_AT + half * TILE, full);
            fetch_tile(told.given, base, told.xbc_row * 2, walk.head * SIZE, (int)token, own + X_AT, full);
#pragma unroll
            for (int half = 0; half < 2; ++half)
                fetch_tile(told.given, base, told.xbc_row * 2, column_c + half * 64, (int)token, own + C_AT + half * TILE, full);
        }
        arrive_behind_copies(full);
        return;
    }
#pragma unroll 1
    for (u32 line = lane / 8; line < CHUNK; line += 4) {
        u64 from = (u64)(told.xbc + (token + min(line, left - 1)) * told.xbc_row) + lane % 8 * 16;
        u32 to = own + in_tile(line, lane % 8);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            copy16(to + B_AT + half * TILE, from + (column_b + half * 64) * 2, 16);
            copy16(to + C_AT + half * TILE, from + (column_c + half * 64) * 2, 16);
        }
        copy16(to + X_AT, from + walk.head * (SIZE * 2), 16);
    }
    commit();
    arrived<0>();
    seen_by_groups();  // products read what the copy engine did not bring
    if (lane == 0) expect(full, 0);
    arrive(full);
}

// A warp that finds tasks and asks for their chunks.
__device__ inline void ask_all(const Told& told, u32 base) {
    int next = block();
    Turn<STAGES> stage;
    for (u32 task = 0;; ++task) {
        Walk walk = find(told, next);
        u32 at = base + TASKS_AT + task % 2 * TASK;
        wait_for(base + DONE + task % 2 * 8, task / 2 & 1 ^ 1);
        if (thread() % 32 == 0) {
            put(at, walk.token), put(at + 4, walk.end), put(at + 8, walk.computed), put(at + 12, walk.head);
            put_address(at + 16, walk.states), put_address(at + 24, walk.inputs);
        }
        tell(base + FOUND + task % 2 * 8);
        if (!walk.end) return commit(), arrived<0>();  // no lane ends before its copies are there
#pragma unroll 1
        for (int begin = walk.computed; begin < walk.end; begin += CHUNK) {
            wait_for(base + EMPTY + stage.place * 8, stage.turn ^ 1);
            ask(told, walk, begin, base + stage.place * STAGE, base + FULL + stage.place * 8);
            stage.next();
        }
    }
}

// Where the state behind `border` tokens is kept, in numbers of 32 bits; -1: it is not.
__device__ inline i64 state_at(const Told& told, const Walk& walk, int border) {
    constexpr Form states{STATE_FORM};
    if (border == 0) return -1;
    int held;
    i64 goal = place((const int*)walk.states, told.state_first, border / CHUNK - 1, 0, walk.head * STATES, SIZE, states, held);
    return held > 0 ? goal : -1;
}

// A warp that sends states which the step makes, as far as they are kept.
__device__ inline void send_all(const Told& told, u32 base) {
    u32 lane = thread() % 32;
    Turn<RING> slot;
    for (u32 task = 0;; ++task) {
        Walk walk = walk_of(base, task);
        if (!walk.end) return;
#pragma unroll 1
        for (int border = walk.computed; border <= walk.end && (border < walk.end || border % CHUNK == 0); border += CHUNK) {
            i64 goal = border > walk.computed ? state_at(told, walk, border) : -1;
            u32 own = base + RING_AT + slot.place * (2 * HALF_BYTES);
            wait_for(base + STAGED + slot.place * 8, slot.turn);
            if (lane == 0 && goal >= 0) {
                int line = (int)(goal / (SIZE / 2));
                send_lines(told.states, told.state, line, own), send_lines(told.states, told.state, line + STATES, own + HALF_BYTES);
                commit_sent();
                was_read<0>();
            }
            tell(base + FREE + slot.place * 8);
            slot.next();
        }
        tell(base + DONE + task % 2 * 8);
    }
}

// Warps that write what a row leaves of its last two chunks: x, and B where the head is the first that shares it.
__device__ inline void keep_all(const Told& told, u32 base) {
    constexpr Form xs{X_FORM}, bs{B_FORM};
    u32 mine = thread() % (KEEPERS * 32), part = mine % 8;
    Turn<STAGES> stage;
    int held;
    for (u32 task = 0;; ++task) {
        Walk walk = walk_of(base, task);
        if (!walk.end) return;
        int kept_from = max(walk.computed, (walk.end - 1) / CHUNK * CHUNK - CHUNK), tiles = walk.head % PER ? 1 : 3;
#pragma unroll 1
        for (int begin = walk.computed; begin < walk.end; begin += CHUNK) {
            wait_for(base + FULL + stage.place * 8, stage.turn);
#pragma unroll 1
            for (int some = 0; some < (begin < kept_from ? 0 : tiles * 2); ++some) {  // half a tile
                int tile = some / 2;
                bool is_x = tile == 0;
                u32 from = base + stage.place * STAGE + (is_x ? X_AT : B_AT + (tile - 1) * TILE), first = some % 2 * 32 + mine / 8;
                u64 goal[4];
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    int at = begin + first + i * 8;
                    bool is_there = at < walk.end;
                    at = min(at, walk.end - 1);
                    i64 where = is_x ? place((const int*)walk.inputs, told.input_first, at / BLOCK, at % BLOCK, walk.head, SIZE, xs, held)
                                     : place((const int*)walk.inputs, told.input_first, at / BLOCK, at % BLOCK, walk.head / PER, STATES, bs, held);
                    goal[i] = is_there && held > 0 ? (is_x ? told.x_kept : told.b_kept) + where * 2 + (is_x ? 0 : (tile - 1) * 128) + part * 16 : 0;
                }
#pragma unroll
                for (u32 i = 0; i < 4; ++i)
                    if (goal[i]) write(goal[i], get4(from + in_tile(first + i * 8, part)));
            }
            tell(base + EMPTY + stage.place * 8);
            stage.next();
        }
        tell(base + DONE + task % 2 * 8);
    }
}

// A chunk's weights, as a product's first operand: what is left of a token's B at each later one, by its step.
__device__ inline void weigh(u32 own, u32 warp, u32 lane, const float (&scores)[8][4], const float (&row_sums)[2], Four (&weights)[4]) {
    u32 row = lane / 4;
#pragma unroll
    for (u32 k = 0; k < 4; ++k) {
        if (k > warp) {  // of later tokens
            weights[k] = Four{0, 0, 0, 0};
            continue;
        }
        bool all = k < warp;
#pragma unroll
        for (u32 j = 0; j < 2; ++j) {
            u32 column = j * 8 + lane % 4 * 2, at = own + (k * 16 + column) * 4;
            Two sums = get2(at + SUMS_AT), steps = get2(at + STEPS_AT);
            float weight[4];
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                bool is_seen = all || row + i / 2 * 8 >= column + i % 2;
                float left = exponential(is_seen ? less(row_sums[i / 2], number(sums.x[i % 2])) : 0.0f);
                float own_weight = times(times(left, scores[k * 2 + j][i]), number(steps.x[i % 2]));
                weight[i] = is_seen ? own_weight : 0.0f;
            }
#pragma unroll
            for (u32 i = 0; i < 2; ++i) weights[k].x[j * 2 + i] = pack(weight[2 * i], weight[2 * i + 1]);
        }
    }
}

// Put a chunk's results, and x by `skip`, into a warp's own 16 lines of a tile. x: its tile.
__device__ inline void put_results(u32 x, u32 to, u32 warp, u32 lane, float skip, const float (&result)[8][4]) {
#pragma unroll
    for (u32 k = 0; k < 4; ++k) {
        u32 at = in_tile(warp * 16 + lane % 16, k * 2 + lane / 16);
        Four given = square(x + at), both;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const float* own = &result[k * 2 + i / 2][i % 2 * 2];
            both.x[i] = pack(plus(own[0], times(skip, widened(given.x[i] & 0xffff))), plus(own[1], times(skip, widened(given.x[i] >> 16))));
        }
        put_square(to + at, both);
    }
}

// Write a warp's own 16 lines of a chunk's results.
__device__ inline void write_results(const Told& told, const Walk& walk, int begin, u32 from, u32 warp, u32 lane) {
    i64 token = walk.token + begin - walk.computed;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        u32 line = warp * 16 + i * 4 + lane / 8;
        Four given = get4(from + in_tile(line, lane % 8));
        if ((int)line < walk.end - begin) write((u64)(told.out + ((token + line) * HEADS + walk.head) * SIZE + lane % 8 * 8), given);
    }
}

// Of a chunk: scores of its tokens by each other.
__device__ inline void multiply_scores(u32 own, float (&scores)[8][4]) {
#pragma unroll
    for (u32 step = 0; step < 8; ++step) {
        u32 at = step / 4 * TILE + step % 4 * 32;
        group_multiply_tiles(scores, own + C_AT + at, own + B_AT + at, step > 0);
    }
    group_commit();
}
// And what the state ahead of it gives.
__device__ inline void multiply_state(u32 own, u32 state, float (&result)[8][4]) {
#pragma unroll
    for (u32 step = 0; step < 8; ++step)
        group_multiply_tile_turned(result, own + C_AT + step / 4 * TILE + step % 4 * 32, state + step * 2048, step > 0);
    group_commit();
}

// A warp group that makes results: of chunks whose state lies in its places of the ring.
__device__ inline void make_results(const Told& told, u32 base, u32 group, u32 warp, u32 lane) {
    Turn<STAGES> stage;
    Turn<RING> slot;
    u32 to = base + RESULTS_AT + group * TILE;
    for (u32 task = 0;; ++task) {
        Walk walk = walk_of(base, task);
        if (!walk.end) return;
        float skip = told.skip[walk.head];
#pragma unroll 1
        for (int begin = walk.computed; begin < walk.end; begin += CHUNK, stage.next(), slot.next()) {
            if (slot.place % RESULT_GROUPS != group) continue;
            u32 own = base + stage.place * STAGE, state = base + RING_AT + slot.place * (2 * HALF_BYTES);
            float scores[8][4] = {}, result[8][4] = {};
            Four weights[4];
            wait_for(base + FULL + stage.place * 8, stage.turn);
            u32 sums_at = own + SUMS_AT + (warp * 16 + lane / 4) * 4;
            float row_sums[2] = {number(get(sums_at)), number(get(sums_at + 32))};
            hold(scores);
            group_begin();
            multiply_scores(own, scores);
            group_arrived<0>(scores);
            weigh(own, warp, lane, scores, row_sums, weights);
            wait_for(base + STAGED + slot.place * 8, slot.turn);
            hold(result);
            group_begin();
            multiply_state(own, state, result);
            group_arrived<0>(result);
            tell(base + FREE + slot.place * 8);
#pragma unroll
            for (u32 i = 0; i < 32; ++i) result[i / 4][i % 4] = times(exponential(row_sums[i % 4 / 2]), result[i / 4][i % 4]);
            hold(weights), hold(result);
            group_begin();
#pragma unroll
            for (u32 step = 0; step < 4; ++step) group_multiply_turned(result, weights[step], own + X_AT + step * 2048);
            group_commit();
            group_arrived<0>(result);
            put_results(own + X_AT, to, warp, lane, skip, result);
            tell(base + EMPTY + stage.place * 8);
            write_results(told, walk, begin, to, warp, lane);
            warp_together();
        }
        if (walk.end % CHUNK == 0) {  // of a state behind the last chunk nothing is read here
            if (slot.place % RESULT_GROUPS == group) {
                wait_for(base + STAGED + slot.place * 8, slot.turn);
                tell(base + FREE + slot.place * 8);
            }
            slot.next();
        }
        tell(base + DONE + task % 2 * 8);
    }
}

// Read a warp's 16 states. at: of the head's upper halves.
__device__ inline void read_state(u64 at, u32 warp, u32 lane, float (&state)[8][4]) {
    at += (warp * 16 + lane / 4) * 128 + lane % 4 * 4;
#pragma unroll
    for (u32 i = 0; i < 16; ++i) {
        u64 own = at + i % 2 * 1024 + i / 2 * 16;
        u32 upper = read1(own), left = read1(own + HALF_BYTES);
        state[i / 2][i % 2 * 2] = number((upper << 16) + (u32)((int)(left << 16) >> 16));
        state[i / 2][i % 2 * 2 + 1] = number((upper & 0xffff0000u) + (u32)((int)left >> 16));
    }
}

// Put a warp's 16 states into the ring. warp: of eight.
__device__ inline void stage_state(u32 base, Turn<RING>& slot, u32 warp, u32 lane, const float (&state)[8][4]) {
    u32 to = base + RING_AT + slot.place * (2 * HALF_BYTES);
    wait_for(base + FREE + slot.place * 8, slot.turn ^ 1);
#pragma unroll
    for (u32 k = 0; k < 4; ++k) {
        u32 at = to + in_tile(warp * 16 + lane % 16, k * 2 + lane / 16);
        Four upper, left;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const float* own = &state[k * 2 + i / 2][i % 2 * 2];
            u32 one = bits_of(own[0]), two = bits_of(own[1]);
            upper.x[i] = bytes_of(one + 0x8000, two + 0x8000, 0x7632), left.x[i] = bytes_of(one, two, 0x5410);
        }
        put_square(at, upper), put_square(at + HALF_BYTES, left);
    }
    seen_by_groups();
    tell(base + STAGED + slot.place * 8);
    slot.next();
}

// A chunk's B by what is left of it behind the chunk, of a warp's 16 states, as a product's first operand. Gives what is
// left of the state.
__device__ inline float weigh_states(u32 own, u32 own_weights, u32 warp, u32 lane, Four (&weighted)[4]) {
    float last = number(get(own + SUMS_AT + (CHUNK - 1) * 4));
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        u32 at = (lane + i * 32) * 4;
        put(own_weights + at, bits_of(times(exponential(less(last, number(get(own + SUMS_AT + at)))), number(get(own + STEPS_AT + at)))));
    }
    warp_together();
    u32 b_at = own + B_AT + warp / 4 * TILE + in_tile(lane / 16 * 8 + lane % 8, warp % 4 * 2 + lane / 8 % 2);
#pragma unroll
    for (u32 k = 0; k < 4; ++k) {
        u32 at = own_weights + (k * 16 + lane % 4 * 2) * 4;
        Two low = get2(at), high = get2(at + 32);
        Four b = square_turned(b_at + k * 2048);
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const Two& by = i / 2 ? high : low;
            weighted[k].x[i] = pack(times(widened(b.x[i] & 0xffff), number(by.x[0])), times(widened(b.x[i] >> 16), number(by.x[1])));
        }
    }
    warp_together();
    return exponential(last);
}

// Two warp groups that walk the states. warp: of eight, which have 16 states each.
__device__ inline void walk_states(const Told& told, u32 base, u32 warp, u32 lane) {
    Turn<STAGES> stage;
    Turn<RING> slot;
    u32 own_weights = base + WEIGHTS_AT + warp * (CHUNK * 4);
    for (u32 task = 0;; ++task) {
        Walk walk = walk_of(base, task);
        if (!walk.end) return;
        float state[8][4] = {};
        i64 source = state_at(told, walk, walk.computed);
        if (source >= 0) read_state(told.state + source * 4, warp, lane, state);
        stage_state(base, slot, warp, lane, state);
        int whole = (walk.end - walk.computed) / CHUNK;
        Four even[4], odd[4];  // chunks' weighted B
        float decay = 0.0f;
        auto advance = [&](Four (&weighted)[4], Four (&next)[4]) {
            u32 own = base + stage.place * STAGE, empty = base + EMPTY + stage.place * 8;
            Turn<STAGES> other = stage;  // of the next chunk, if there is one
            stage.next();
            if (--whole) other = stage;
#pragma unroll
            for (u32 i = 0; i < 32; ++i) state[i / 4][i % 4] = times(decay, state[i / 4][i % 4]);
            hold(weighted), hold(state);
            group_begin();
#pragma unroll
            for (u32 k = 0; k < 4; ++k) group_multiply_turned(state, weighted[k], own + X_AT + k * 2048);
            group_commit();
            wait_for(base + FULL + other.place * 8, other.turn);
            decay = weigh_states(base + other.place * STAGE, own_weights, warp, lane, next);
            group_arrived<0>(state);
            hold(weighted), hold(next);
            tell(empty);
#pragma unroll
            for (u32 i = 0; i < 32; ++i) state[i / 4][i % 4] = number((u32)min((int)bits_of(state[i / 4][i % 4]), 0x7fff7fff));
            stage_state(base, slot, warp, lane, state);
        };
        if (whole) {
            wait_for(base + FULL + stage.place * 8, stage.turn);
            decay = weigh_states(base + stage.place * STAGE, own_weights, warp, lane, even);
        }
#pragma unroll 1
        while (whole) {
            advance(even, odd);
            if (!whole) break;
            advance(odd, even);
        }
        if (walk.end % CHUNK) {  // what is behind an open chunk nobody reads
            wait_for(base + FULL + stage.place * 8, stage.turn);
            tell(base + EMPTY + stage.place * 8);
            stage.next();
        }
        tell(base + DONE + task % 2 * 8);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) mamba2_prompts(const __grid_constant__ Told told) {
    let_next_begin();
    extern __shared__ __align__(1024) unsigned char memory[];
    u32 base = (u32)__cvta_generic_to_shared(memory), lane = thread() % 32;
    u32 warp = from_lane(thread() / 32, 0);  // one for the warp: so are addresses of products, which the compiler then sees
    if (thread() == 0) {
        for (u32 i = 0; i < STAGES; ++i) prepare(base + FULL + i * 8, 1 + 32), prepare(base + EMPTY + i * 8, STATE_WARPS + RESULT_WARPS + KEEPERS);
        for (u32 i = 0; i < RING; ++i) prepare(base + STAGED + i * 8, STATE_WARPS), prepare(base + FREE + i * 8, RESULT_WARPS + 1);
        for (u32 i = 0; i < 2; ++i) prepare(base + FOUND + i * 8, 1), prepare(base + DONE + i * 8, STATE_WARPS + RESULT_GROUPS * RESULT_WARPS + KEEPERS + 1);
        prepared();
    }
    together();
    wait_for_before();
    // Of 96 registers of a lane those that help need few.
    u32 other = warp - STATE_WARPS, helper = other - RESULT_GROUPS * RESULT_WARPS;
    if (warp < STATE_WARPS) {
        take_registers<104>();
        walk_states(told, base, warp, lane);
    } else if (other < RESULT_GROUPS * RESULT_WARPS) {
        take_registers<112>();
        make_results(told, base, other / RESULT_WARPS, other % RESULT_WARPS, lane);
    } else {
        give_registers<48>();
        if (helper == 0) ask_all(told, base);
        else if (helper > 1) keep_all(told, base);
        else send_all(told, base);
    }
}
