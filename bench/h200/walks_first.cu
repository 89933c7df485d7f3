// Mamba-2 over prompts: chunks walked one behind the other. Told of and launched by mamba2_prompts.py.
//
// A task is EACH heads of a row, which share B and C; a block takes one task after the other. Two warp groups have 64 of
// the states each, [states, channels] in registers, and put what products and the cache take of them into a ring in
// shared memory, ahead of each chunk: the upper halves of 128 states, then what is left. A third makes results: scores
// of a chunk do not wait for its state. Four warps help: one asks for chunks, one sends states by the copy engine, two
// write what the row leaves of its last chunks.
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
#define THREADS 512
#define TILE (CHUNK * 128)  // 64 lines of 64 numbers
#define HALF_BYTES (SIZE * STATES * 2)
// In shared memory: chunks that are on their way or used; the ring of states; results; weights of tokens of a warp, by
// heads; tasks; barriers. Of a chunk: C and B, two tiles each, x of each head, its sums and steps.
#define C_AT 0
#define B_AT (2 * TILE)
#define X_AT (4 * TILE)
#define SUMS_AT (X_AT + EACH * TILE)
#define STEPS_AT (SUMS_AT + EACH * CHUNK * 4)
#define STAGE (SUMS_AT + 1024)
#define RING_AT (STAGES * STAGE)
#define RESULTS_AT (RING_AT + RING * 2 * HALF_BYTES)
#define WEIGHTS_AT (RESULTS_AT + TILE)
#define TASKS_AT (WEIGHTS_AT + 8 * EACH * CHUNK * 4)
#define TASK 64
#define BARRIERS_AT (TASKS_AT + 2 * TASK)
#define FULL BARRIERS_AT               // of each stage
#define EMPTY (FULL + STAGES * 8)      // of each stage
#define STAGED (EMPTY + STAGES * 8)    // of each place in the ring: a state is there
#define FREE (STAGED + RING * 8)       // of each place in the ring
#define FOUND (FREE + RING * 8)        // of each task
#define DONE (FOUND + 16)              // of each task
#define STATE_WARPS 8
#define RESULT_WARPS 4
#define KEEPERS 2

// Of a tile, where 16 bytes of a line lie.
__device__ inline u32 in_tile(u32 line, u32 part) { return line * 128 + (part ^ line % 8) * 16; }

// A place in a ring of COUNT, and which of its turns it is.
template <int COUNT> struct Turn {
    u32 place = 0, turn = 0;
    __device__ inline void next() {
        if (++place == COUNT) place = 0, turn ^= 1;
    }
};

// A task: `first` of the heads of a row; where the row's tables begin. end 0: there is none.
struct Walk {
    int token, end, computed, first;
    u64 states, inputs;
};
__device__ inline Walk walk_of(u32 base, u32 task) {
    u32 at = base + TASKS_AT + task % 2 * TASK;
    wait_for(base + FOUND + task % 2 * 8, task / 2 & 1);
    Walk walk;
    walk.token = get(at), walk.end = get(at + 4), walk.computed = get(at + 8), walk.first = get(at + 12);
    walk.states = address_at(at + 16), walk.inputs = address_at(at + 24);
    return walk;
}
// Told by a warp, once all its lanes have come.
__device__ inline void tell(u32 barrier) {
    warp_together();
    if (thread() % 32 == 0) arrive(barrier);
}

// The first task from `task` on that there is something to do for, `task` then being the one behind it.
__device__ inline Walk find(const Told& told, int& task) {
    int ahead = *told.num_ahead, tasks = max(told.num_rows - ahead, 0) * (HEADS / EACH);
    Walk walk{0, 0, 0, 0, 0, 0};
    while (task < tasks) {
        int row = ahead + task / (HEADS / EACH);
        walk.first = task % (HEADS / EACH) * EACH;
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
    int column_b = columns + walk.first / PER * STATES, column_c = column_b + GROUPS * STATES;
#pragma unroll
    for (u32 i = 0; i < CHUNK / 32; ++i) {
        u32 place = lane + i * 32;
        i64 at = (token + min(place, left - 1)) * HEADS + walk.first;
#pragma unroll
        for (u32 head = 0; head < EACH; ++head) {
            copy4(own + SUMS_AT + (head * CHUNK + place) * 4, (u64)(told.total + at + head), 4);
            copy4(own + STEPS_AT + (head * CHUNK + place) * 4, (u64)(told.dt + at + head), 4);
        }
    }
    if (left >= CHUNK) {
        if (lane == 0) {
            u64 base = (u64)told.xbc;
            expect(full, (4 + EACH) * TILE);
#pragma unroll
            for (int half = 0; half < 2; ++half)
                fetch_tile(told.given, base, told.xbc_row * 2, column_b + half * 64, (int)token, own + B_AT + half * TILE, full);
#pragma unroll
            for (int head = 0; head < EACH; ++head)
                fetch_tile(told.given, base, told.xbc_row * 2, (walk.first + head) * SIZE, (int)token, own + X_AT + head * TILE, full);
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
#pragma unroll
        for (int head = 0; head < EACH; ++head) copy16(to + X_AT + head * TILE, from + (walk.first + head) * (SIZE * 2), 16);
    }
    commit();
    arrived<0>();
    seen_by_groups();  // products read what the copy engine did not bring
    if (lane == 0) arrive(full);
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
            put(at, walk.token), put(at + 4, walk.end), put(at + 8, walk.computed), put(at + 12, walk.first);
            put_address(at + 16, walk.states), put_address(at + 24, walk.inputs);
        }
        tell(base + FOUND + task % 2 * 8);
        if (!walk.end) return;
#pragma unroll 1
        for (int begin = walk.computed; begin < walk.end; begin += CHUNK) {
            wait_for(base + EMPTY + stage.place * 8, stage.turn ^ 1);
            ask(told, walk, begin, base + stage.place * STAGE, base + FULL + stage.place * 8);
            stage.next();
        }
    }
}

// Where a head's state behind `border` tokens is kept, in numbers of 32 bits; -1: it is not.
__device__ inline i64 state_at(const Told& told, const Walk& walk, int border, int head) {
    constexpr Form states{STATE_FORM};
    if (border == 0) return -1;
    int held;
    i64 goal = place((const int*)walk.states, told.state_first, border / CHUNK - 1, 0, (walk.first + head) * STATES, SIZE, states, held);
    return held > 0 ? goal : -1;
}

// A lane that sends states which the step makes, as far as they are kept.
__device__ inline void send_all(const Told& told, u32 base) {
    Turn<RING> slot;
    u32 before = 0;  // the barrier of the place that was sent from last
    for (u32 task = 0;; ++task) {
        Walk walk = walk_of(base, task);
        if (!walk.end) break;
#pragma unroll 1
        for (int border = walk.computed; border <= walk.end && (border < walk.end || border % CHUNK == 0); border += CHUNK) {
#pragma unroll 1
            for (int head = 0; head < EACH; ++head) {
                i64 goal = border > walk.computed ? state_at(told, walk, border, head) : -1;
                u32 own = base + RING_AT + slot.place * (2 * HALF_BYTES);
                wait_for(base + STAGED + slot.place * 8, slot.turn);
                if (goal >= 0) {
                    int line = (int)(goal / (SIZE / 2));
                    send_lines(told.states, told.state, line, own), send_lines(told.states, told.state, line + STATES, own + HALF_BYTES);
                }
                commit_sent();
                was_read<1>();
                if (before) arrive(before);
                before = base + FREE + slot.place * 8;
                slot.next();
            }
        }
        arrive(base + DONE + task % 2 * 8);
    }
    was_read<0>();
}

// Warps that write what a row leaves of its last two chunks: x of the heads, and B where they are the first that share it.
__device__ inline void keep_all(const Told& told, u32 base) {
    constexpr Form xs{X_FORM}, bs{B_FORM};
    u32 mine = thread() % (KEEPERS * 32), part = mine % 8;
    Turn<STAGES> stage;
    int held;
    for (u32 task = 0;; ++task) {
        Walk walk = walk_of(base, task);
        if (!walk.end) return;
        int kept_from = max(walk.computed, (walk.end - 1) / CHUNK * CHUNK - CHUNK), tiles = walk.first % PER ? EACH : EACH + 2;
#pragma unroll 1
        for (int begin = walk.computed; begin < walk.end; begin += CHUNK) {
            wait_for(base + FULL + stage.place * 8, stage.turn);
#pragma unroll 1
            for (int some = 0; some < (begin < kept_from ? 0 : tiles * 2); ++some) {  // half a tile
                int tile = some / 2;
                bool is_x = tile < EACH;
                u32 from = base + stage.place * STAGE + (is_x ? X_AT + tile * TILE : B_AT + (tile - EACH) * TILE), first = some % 2 * 32 + mine / 8;
                u64 goal[4];
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    int at = begin + first + i * 8;
                    bool is_there = at < walk.end;
                    at = min(at, walk.end - 1);
                    i64 where = is_x ? place((const int*)walk.inputs, told.input_first, at / BLOCK, at % BLOCK, walk.first + tile, SIZE, xs, held)
                                     : place((const int*)walk.inputs, told.input_first, at / BLOCK, at % BLOCK, walk.first / PER, STATES, bs, held);
                    goal[i] = is_there && held > 0 ? (is_x ? told.x_kept : told.b_kept) + where * 2 + (is_x ? 0 : (tile - EACH) * 128) + part * 16 : 0;
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

// A chunk's weights of one head, as a product's first operand: what is left of a token's B at each later one, by its step.
__device__ inline void weigh(u32 own, int head, u32 warp, u32 lane, const float (&scores)[8][4], const float (&row_sums)[2], Four (&weights)[4]) {
    u32 sums_at = own + SUMS_AT + head * (CHUNK * 4), steps_at = own + STEPS_AT + head * (CHUNK * 4);
    u32 row = warp * 16 + lane / 4;
#pragma unroll
    for (u32 j = 0; j < 8; ++j) {
        u32 column = j * 8 + lane % 4 * 2;
        Two sums = get2(sums_at + column * 4), steps = get2(steps_at + column * 4);
        float weight[4];
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            bool is_seen = row + i / 2 * 8 >= column + i % 2;
            float left = exponential(is_seen ? less(row_sums[i / 2], number(sums.x[i % 2])) : 0.0f);
            float own_weight = times(times(left, scores[j][i]), number(steps.x[i % 2]));
            weight[i] = is_seen ? own_weight : 0.0f;
        }
#pragma unroll
        for (u32 i = 0; i < 2; ++i) weights[j / 2].x[j % 2 * 2 + i] = pack(weight[2 * i], weight[2 * i + 1]);
    }
}

// Write a head's results of a chunk. x: its tile; to: a warp's own 16 lines of a tile.
__device__ inline void write_results(const Told& told, const Walk& walk, int begin, int head, u32 x, u32 to, u32 warp, u32 lane, float skip, const float (&result)[8][4]) {
#pragma unroll
    for (u32 j = 0; j < 8; ++j)
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            u32 at = in_tile(warp * 16 + lane / 4 + i * 8, j) + lane % 4 * 4, both = get(x + at);
            put(to + at, pack(plus(result[j][2 * i], times(skip, widened(both & 0xffff))), plus(result[j][2 * i + 1], times(skip, widened(both >> 16)))));
        }
    warp_together();
    i64 token = walk.token + begin - walk.computed;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        u32 line = warp * 16 + i * 4 + lane / 8;
        Four given = get4(to + in_tile(line, lane % 8));
        if ((int)line < walk.end - begin) write((u64)(told.out + ((token + line) * HEADS + walk.first + head) * SIZE + lane % 8 * 8), given);
    }
    warp_together();
}

// A warp group that makes results.
__device__ inline void make_results(const Told& told, u32 base, u32 warp, u32 lane) {
    Turn<STAGES> stage;
    Turn<RING> slot;
    for (u32 task = 0;; ++task) {
        Walk walk = walk_of(base, task);
        if (!walk.end) return;
        float skip[EACH];
#pragma unroll
        for (int head = 0; head < EACH; ++head) skip[head] = told.skip[walk.first + head];
#pragma unroll 1
        for (int begin = walk.computed; begin < walk.end; begin += CHUNK) {
            u32 own = base + stage.place * STAGE;
            wait_for(base + FULL + stage.place * 8, stage.turn);
            float scores[8][4] = {};
            hold(scores);
            group_begin();
#pragma unroll
            for (u32 step = 0; step < 8; ++step) {
                u32 at = step / 4 * TILE + step % 4 * 32;
                group_multiply_tiles(scores, own + C_AT + at, own + B_AT + at, step > 0);
            }
            group_commit();
            group_arrived<0>(scores);
#pragma unroll
            for (int head = 0; head < EACH; ++head) {
                u32 sums_at = own + SUMS_AT + (head * CHUNK + warp * 16 + lane / 4) * 4;
                float row_sums[2] = {number(get(sums_at)), number(get(sums_at + 32))};
                Four weights[4];
                weigh(own, head, warp, lane, scores, row_sums, weights);
                wait_for(base + STAGED + slot.place * 8, slot.turn);
                u32 state = base + RING_AT + slot.place * (2 * HALF_BYTES);
                float result[8][4] = {};
                hold(result);
                group_begin();
#pragma unroll
                for (u32 step = 0; step < 8; ++step)
                    group_multiply_tile_turned(result, own + C_AT + step / 4 * TILE + step % 4 * 32, state + step * 2048, step > 0);
                group_commit();
                group_arrived<0>(result);
                tell(base + FREE + slot.place * 8);
                slot.next();
#pragma unroll
                for (u32 j = 0; j < 8; ++j)
#pragma unroll
                    for (u32 i = 0; i < 4; ++i) result[j][i] = times(exponential(row_sums[i / 2]), result[j][i]);
                u32 x = own + X_AT + head * TILE;
                hold(weights), hold(result);
                group_begin();
#pragma unroll
                for (u32 step = 0; step < 4; ++step) group_multiply_turned(result, weights[step], x + step * 2048);
                group_commit();
                group_arrived<0>(result);
                write_results(told, walk, begin, head, x, base + RESULTS_AT, warp, lane, skip[head], result);
            }
            tell(base + EMPTY + stage.place * 8);
            stage.next();
        }
        if (walk.end % CHUNK == 0)  // of states behind the last chunk nothing is read here
#pragma unroll 1
            for (int head = 0; head < EACH; ++head) {
                wait_for(base + STAGED + slot.place * 8, slot.turn);
                tell(base + FREE + slot.place * 8);
                slot.next();
            }
        tell(base + DONE + task % 2 * 8);
    }
}

// Put a warp's 16 states of a head into the ring. warp: of eight.
__device__ inline void stage_state(u32 base, Turn<RING>& slot, u32 warp, u32 lane, const float (&state)[8][4]) {
    u32 to = base + RING_AT + slot.place * (2 * HALF_BYTES) + (warp * 16 + lane / 4) * 128 + lane % 4 * 4;
    wait_for(base + FREE + slot.place * 8, slot.turn ^ 1);
#pragma unroll
    for (u32 j = 0; j < 8; ++j)
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            u32 at = to + i * 1024 + (j ^ lane / 4) * 16, one = bits_of(state[j][2 * i]), two = bits_of(state[j][2 * i + 1]);
            put(at, bytes_of(one + 0x8000, two + 0x8000, 0x7632));
            put(at + HALF_BYTES, bytes_of(one, two, 0x5410));
        }
    seen_by_groups();
    tell(base + STAGED + slot.place * 8);
    slot.next();
}

// Two warp groups that walk the states. warp: of eight, which have 16 states each.
__device__ inline void walk_states(const Told& told, u32 base, u32 warp, u32 lane) {
    Turn<STAGES> stage;
    Turn<RING> slot;
    u32 own_weights = base + WEIGHTS_AT + warp * (EACH * CHUNK * 4);
    for (u32 task = 0;; ++task) {
        Walk walk = walk_of(base, task);
        if (!walk.end) return;
        float state[EACH][8][4] = {};
#pragma unroll
        for (int head = 0; head < EACH; ++head) {
            i64 source = state_at(told, walk, walk.computed, head);
            if (source >= 0) {
                u64 from = told.state + source * 4 + (warp * 16 + lane / 4) * 128 + lane % 4 * 4;
#pragma unroll
                for (u32 j = 0; j < 8; ++j)
#pragma unroll
                    for (u32 i = 0; i < 2; ++i) {
                        u32 upper = read1(from + i * 1024 + j * 16), left = read1(from + i * 1024 + j * 16 + HALF_BYTES);
                        state[head][j][2 * i] = number((upper << 16) + (u32)((int)(left << 16) >> 16));
                        state[head][j][2 * i + 1] = number((upper & 0xffff0000u) + (u32)((int)left >> 16));
                    }
            }
            stage_state(base, slot, warp, lane, state[head]);
        }
#pragma unroll 1
        for (int begin = walk.computed; begin < walk.end; begin += CHUNK) {
            u32 own = base + stage.place * STAGE, empty = base + EMPTY + stage.place * 8;
            wait_for(base + FULL + stage.place * 8, stage.turn);
            stage.next();
            if (walk.end - begin < CHUNK) {  // what is behind an open chunk nobody reads
                tell(empty);
                continue;
            }
            float decay[EACH];
#pragma unroll
            for (u32 head = 0; head < EACH; ++head) {
                u32 sums = own + SUMS_AT + head * (CHUNK * 4), steps = own + STEPS_AT + head * (CHUNK * 4);
                float last = number(get(sums + (CHUNK - 1) * 4));
                decay[head] = exponential(last);
#pragma unroll
                for (u32 i = 0; i < 2; ++i) {
                    u32 at = (lane + i * 32) * 4;
                    put(own_weights + head * (CHUNK * 4) + at, bits_of(times(exponential(less(last, number(get(sums + at)))), number(get(steps + at)))));
                }
            }
            warp_together();
            u32 b_at = own + B_AT + warp / 4 * TILE + in_tile(lane / 16 * 8 + lane % 8, warp % 4 * 2 + lane / 8 % 2);
#pragma unroll
            for (u32 head = 0; head < EACH; ++head) {
                Four weighted[4];
#pragma unroll
                for (u32 k = 0; k < 4; ++k) {
                    u32 at = own_weights + (head * CHUNK + k * 16 + lane % 4 * 2) * 4;
                    Two low = get2(at), high = get2(at + 32);
                    Four b = square_turned(b_at + k * 2048);
#pragma unroll
                    for (u32 i = 0; i < 4; ++i) {
                        const Two& by = i / 2 ? high : low;
                        weighted[k].x[i] = pack(times(widened(b.x[i] & 0xffff), number(by.x[0])), times(widened(b.x[i] >> 16), number(by.x[1])));
                    }
                }
#pragma unroll
                for (u32 i = 0; i < 32; ++i) state[head][i / 4][i % 4] = times(decay[head], state[head][i / 4][i % 4]);
                hold(weighted), hold(state[head]);
                group_begin();
#pragma unroll
                for (u32 k = 0; k < 4; ++k) group_multiply_turned(state[head], weighted[k], own + X_AT + head * TILE + k * 2048);
                group_commit();
                group_arrived<0>(state[head]);
                if (head == EACH - 1) tell(empty);
#pragma unroll
                for (u32 i = 0; i < 32; ++i) state[head][i / 4][i % 4] = number((u32)min((int)bits_of(state[head][i / 4][i % 4]), 0x7fff7fff));
                stage_state(base, slot, warp, lane, state[head]);
            }
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
        for (u32 i = 0; i < 2; ++i) prepare(base + FOUND + i * 8, 1), prepare(base + DONE + i * 8, STATE_WARPS + RESULT_WARPS + KEEPERS + 1);
        prepared();
    }
    together();
    wait_for_before();
    // Of 128 registers of a lane those that help need few.
    if (warp < STATE_WARPS) {
        if (EACH > 1) take_registers<144>();
        walk_states(told, base, warp, lane);
    } else if (warp < STATE_WARPS + RESULT_WARPS) {
        if (EACH > 1) take_registers<152>();
        make_results(told, base, warp - STATE_WARPS, lane);
    } else {
        if (EACH > 1) give_registers<72>();
        if (warp == STATE_WARPS + RESULT_WARPS) ask_all(told, base);
        else if (warp > STATE_WARPS + RESULT_WARPS + 1) keep_all(told, base);
        else if (lane == 0) send_all(told, base);
    }
}
