// The gated delta rule where rows decode, in one kernel. Told of and launched by delta_step.py.
//
// A task is a row and a head of its keys, with those of the values that share it. Of a block's warps the last one, the
// scout, finds where a task's things lie, brings keys and gates, norms the token's query and key and sums its gates: a
// task ahead of the others, for which it makes T meanwhile. Of those each takes 32 channels of one head. Its states,
// updates and values come by asynchronous copies into a ring of its own, SLOT bytes a step, ROUND steps a task, on past
// the end of each task to the next: memory never waits for a task. Eight lanes copy 128 bytes that lie together, so that
// the L2 is asked for whole lines; lines lie in a step by exclusive or, and no two lanes meet in a bank, of those that
// read, four rows at once, nor of those that copy. Column n of the product j of four is channel 4 n + j.
//
// Invariant: the operations on a head are those of `delta_ready` and `delta_decode`, in the same order; where those
// multiply by zeros, they are left out.

// Constants of a tensor that is kept: see `octavo.ops.scan.kept.Form`.
struct Form {
    i64 block, part, line;
    int lines, of_item, runs, parts, blocks;
};
#if PAIRS
#define COPY_STATE copy16_of_256
#else
#define COPY_STATE copy16
#endif
#define CHUNK 64
#define SIZE 128  // of a head's keys, and of its values
#define WARPS (4 * PER)  // that compute
#define THREADS (32 * WARPS + 32)
#if DEPTH > 9
#error "a step of the task ahead is one of its states"
#endif
#define SLOT 2048
#define ROUND 11  // steps of a task: eight of 16 rows of the state, two of 32 tokens' updates, one of values

struct Told {
    const u16 *qkv, *a, *b;
    const float *decay, *dt_bias;
    u16* out;
    const i64* rows;
    const int *query_start, *seq_lens, *state_table, *input_table;
    const float* state;
    u16 *key_kept, *value_kept, *update_kept;
    float *total_kept, *rate_kept;
    i64 qkv_row, a_row, b_row;
    int state_columns, input_columns, state_first, input_first, num_rows;
    float scale;
};

// In shared memory, of a block: rings; what the scout brings of two tasks: the chunk's keys, the query, of each head the
// chunk's sums and the rates of the token's block of 16; what warps make of one task: of each head M, the factors of o,
// T's row, and the triangle; where three tasks' things lie.
#define PITCH 272
#define QUERY (CHUNK * PITCH)
#define SUMS (QUERY + 256)
#define RATES (SUMS + PER * 256)
#define BROUGHT_BYTES (RATES + PER * 64)
#define M_PITCH 144
#define FACTOR (16 * M_PITCH)
#define T_ROW (FACTOR + 128)
#define TRIANGLE (T_ROW + 64)
#define MADE_BYTES (TRIANGLE + 1024 + 16)
#define BROUGHT_AT (WARPS * DEPTH * SLOT)
#define MADE_AT (BROUGHT_AT + 2 * BROUGHT_BYTES)
#define PLACES_AT (MADE_AT + PER * MADE_BYTES)
// Addresses, 0 where nothing is: of 64 tokens' updates, of 16 tokens' values, of states; where the token's update, its
// value and its result go; the token's position.
#define UPDATES 0
#define VALUES 512
#define STATES 640
#define GOALS 672
#define LAST 696
#define PLACES_BYTES 704

struct Row {
    int token, next, end;
    i64 table_row;
    __device__ bool is_there() const { return next > token; }
    __device__ int last() const { return is_there() ? end - 1 : 0; }
};

__device__ inline Row row_of(const Told& told, int task) {
    int row = task / KEY_HEADS;
    if (row >= told.num_rows) return Row{0, 0, 1, 0};
    return Row{told.query_start[row], told.query_start[row + 1], told.seq_lens[row], told.rows[row]};
}

// Where a lane looks in a table, and what it will add to the block's address.
struct Sought {
    const int* entry;  // null: nothing is asked for
    i64 inner;
};

__device__ inline Sought seek(const int* table, int first_part, int entry, int offset, int run, const Form& form) {
    int line = offset * form.of_item + run / form.runs, part = first_part + line / form.lines;
    i64 inner = part % form.parts * form.part + line % form.lines * form.line + run % form.runs * (i64)SIZE;
    return Sought{table + entry * form.blocks + part / form.parts, inner};
}

__device__ inline Sought seek_token(const Told& told, const Row& row, int at, const Form& form) {
    const int* table = told.input_table + row.table_row * told.input_columns;
    return seek(table, told.input_first, at / BLOCK, at % BLOCK, 0, form);
}

// Look for thing i of a task: updates of the chunk (0 to 63), values of the token's block of 16 (64), states (80), where
// update and value go (84, 85); 86 and 87 are the rest.
__device__ inline Sought sought_of(int i, const Told& told, const Row& row, int task) {
    constexpr Form states{STATE_FORM}, values{VALUE_FORM}, updates{UPDATE_FORM};
    if (!row.is_there() || i >= 86) return Sought{nullptr, 0};
    int last = row.last(), border = last / CHUNK * CHUNK;
    if (i >= 80 && i < 84) {
        if (i - 80 >= PER || border == 0) return Sought{nullptr, 0};
        const int* own = told.state_table + row.table_row * told.state_columns;
        return seek(own, told.state_first, border / CHUNK - 1, 0, (task % KEY_HEADS * PER + i - 80) * SIZE, states);
    }
    int at = i < 64 ? border + i : i < 80 ? last / 16 * 16 + i - 64 : last;
    if (i < 80 && at >= last) return Sought{nullptr, 0};
    return i < 64 || i == 84 ? seek_token(told, row, at, updates) : seek_token(told, row, at, values);
}

__device__ inline void put_address(u32 at, u64 x) {
    put(at, (u32)x);
    put(at + 4, (u32)(x >> 32));
}

__device__ inline u64 address_at(u32 at) {
    Two both = get2(at);
    return both.x[0] | (u64)both.x[1] << 32;
}

// Write down what was found of thing i: `held` is what the table said.
__device__ inline void tell(int i, u32 places, const Told& told, const Row& row, const Sought& sought, int held) {
    constexpr Form states{STATE_FORM}, values{VALUE_FORM}, updates{UPDATE_FORM};
    bool found = sought.entry != nullptr;
    u64 update = found ? (u64)(told.update_kept + held * updates.block + sought.inner) : 0;
    u64 value = found ? (u64)(told.value_kept + held * values.block + sought.inner) : 0;
    if (i < 64) {
        put_address(places + UPDATES + 8 * i, update);
    } else if (i < 80) {
        bool is_own = row.is_there() && row.last() / 16 * 16 + i - 64 == row.last();
        u64 own = (u64)(told.qkv + row.token * told.qkv_row + 2 * KEY_HEADS * SIZE);
        put_address(places + VALUES + 8 * (i - 64), is_own ? own : value);
    } else if (i < 84) {
        put_address(places + STATES + 8 * (i - 80), found ? (u64)(told.state + held * states.block + sought.inner) : 0);
    } else if (i < 86) {
        put_address(places + GOALS + 8 * (i - 84), held == 0 ? 0 : i == 84 ? update : value);
    } else if (i == 86) {
        put_address(places + GOALS + 16, row.is_there() ? (u64)(told.out + (i64)row.token * (HEADS * SIZE)) : 0);
    } else {
        put(places + LAST, row.last());
    }
}

// Find where a task's things lie.
__device__ inline void find(const Told& told, int task, u32 places, u32 lane) {
    Row row = row_of(told, task);
    Sought sought[3];
    int held[3];
#pragma unroll
    for (int turn = 0; turn < 3; ++turn) sought[turn] = sought_of(turn * 32 + lane, told, row, task);
#pragma unroll
    for (int turn = 0; turn < 3; ++turn) held[turn] = sought[turn].entry ? *sought[turn].entry : 0;
#pragma unroll
    for (int turn = 0; turn < 3; ++turn)
        if (turn * 32 + lane < 88) tell(turn * 32 + lane, places, told, row, sought[turn], held[turn]);
}

// log(1 + e^x); see `octavo.ops.scan.gates_gpu.softplus`.
__device__ inline float softplus(float x) {
    float y = exponential(less(0.0f, x < 0.0f ? -x : x)), s = over(y, plus(y, 2.0f)), square = times(s, s);
    float p = plus(times(square, (float)(1.0 / 17.0)), (float)(1.0 / 15.0));
    p = plus(times(p, square), (float)(1.0 / 13.0));
    p = plus(times(p, square), (float)(1.0 / 11.0));
    p = plus(times(p, square), (float)(1.0 / 9.0));
    p = plus(times(p, square), (float)(1.0 / 7.0));
    p = plus(times(p, square), (float)(1.0 / 5.0));
    p = plus(times(p, square), (float)(1.0 / 3.0));
    return plus(x > 0.0f ? x : 0.0f, times(plus(times(p, square), 1.0f), plus(s, s)));
}

// Eight channels of the token's query (lanes 0 to 15) or key, of norm 1; see `octavo.ops.compile.row_sum.row_sums`.
__device__ inline Four normed(const Four& given, float scale, u32 lane) {
    float x[8], sum[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        x[i] = widened(i % 2 ? given.x[i / 2] >> 16 : given.x[i / 2] & 0xffff);
        sum[i] = times(x[i], x[i]);
    }
    float total = plus(plus(plus(sum[0], sum[1]), plus(sum[2], sum[3])), plus(plus(sum[4], sum[5]), plus(sum[6], sum[7])));
#pragma unroll
    for (u32 apart = 8; apart > 0; apart /= 2) total = plus(total, number(from_lane(bits_of(total), lane ^ apart)));
    float factor = over_exact(1.0f, root(plus(total, 1e-6f)));
    if (lane < 16) factor = times(factor, scale);
    Four found;
#pragma unroll
    for (int i = 0; i < 4; ++i) found.x[i] = pack(times(x[2 * i], factor), times(x[2 * i + 1], factor));
    return found;
}

// Bring what all warps share of a task, and keep what the token brings to it: its key, sums and rates.
__device__ inline void bring(const Told& told, int task, u32 to, u32 lane) {
    constexpr Form keys{KEY_FORM}, totals{TOTAL_FORM}, rates{RATE_FORM};
    Row row = row_of(told, task);
    if (!row.is_there()) return;
    int last = row.last(), border = last / CHUNK * CHUNK, begin = last / 16 * 16, key_head = task % KEY_HEADS;
    int first_head = key_head * PER, own_head = first_head + (int)(lane % PER);
    const u16* own = told.qkv + row.token * told.qkv_row + key_head * SIZE + lane % 16 * 8;
    Four given = read((u64)(lane < 16 ? own : own + KEY_HEADS * SIZE));
    float x = widened(told.a[row.token * told.a_row + own_head]), y = widened(told.b[row.token * told.b_row + own_head]);
    float bias = told.dt_bias[own_head], decay = told.decay[own_head];
    u64 nowhere = (u64)told.state, key_at[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // tokens `lane` and 32 + `lane`, and sums of the chunk
        int token = half * 32 + lane, at = border + token;
        bool is_old = at < last;
        Sought sought = seek_token(told, row, is_old ? at : border, keys);
        key_at[half] = is_old ? (u64)(told.key_kept + *sought.entry * keys.block + sought.inner + key_head * SIZE) : 0;
        sought = seek_token(told, row, is_old ? at : border, totals);
        u64 from = is_old ? (u64)(told.total_kept + *sought.entry * totals.block + sought.inner + first_head) : 0;
        for (int head = 0; head < PER; ++head)
            copy4(to + SUMS + head * 256 + token * 4, from ? from + head * 4 : nowhere, from ? 4 : 0);
        if (token / 16 == (begin - border) / 16) {
            sought = seek_token(told, row, is_old ? at : border, rates);
            from = is_old ? (u64)(told.rate_kept + *sought.entry * rates.block + sought.inner + first_head) : 0;
            for (int head = 0; head < PER; ++head)
                copy4(to + RATES + head * 64 + token % 16 * 4, from ? from + head * 4 : nowhere, from ? 4 : 0);
        }
    }
    int turns = (begin - border) / 2 + 8;
#pragma unroll 4
    for (int turn = 0; turn < turns; ++turn) {  // two keys at once
        int token = turn * 2 + lane / 16;
        u64 at = turn < 16 ? key_at[0] : key_at[1];
        u64 from = from_lane((u32)at, token % 32) | (u64)from_lane((u32)(at >> 32), token % 32) << 32;
        copy16(to + token * PITCH + lane % 16 * 16, from ? from + lane % 16 * 16 : nowhere, from ? 16 : 0);
    }
    Sought key_goal = seek_token(told, row, last, keys), total_goal = seek_token(told, row, last, totals);
    Sought rate_goal = seek_token(told, row, last, rates);
    int key_block = *key_goal.entry, total_block = *total_goal.entry, rate_block = *rate_goal.entry;
    commit();
    Four of_token = normed(given, told.scale, lane);
    arrived<0>();
    warp_together();
    put4(lane < 16 ? to + QUERY + lane * 16 : to + (last - border) * PITCH + (lane - 16) * 16, of_token);
    if (lane >= 16 && key_block > 0)
        write((u64)(told.key_kept + key_block * keys.block + key_goal.inner + key_head * SIZE) + (lane - 16) * 16, of_token);
    if (lane < PER) {
        u32 sums = to + SUMS + lane * 256 + (last - border) * 4;
        float sum = last > border ? number(get(sums - 4)) : 0.0f;
        sum = plus(sum, times(decay, softplus(plus(x, bias))));
        float rate = over(1.0f, plus(1.0f, exponential(less(0.0f, y))));
        put(sums, bits_of(sum));
        put(to + RATES + lane * 64 + last % 16 * 4, bits_of(rate));
        if (total_block > 0) told.total_kept[total_block * totals.block + total_goal.inner + own_head] = sum;
        if (rate_block > 0) told.rate_kept[rate_block * rates.block + rate_goal.inner + own_head] = rate;
    }
}

// What a warp asks for of a task.
struct Ahead {
    u64 state;   // of the lane's first row and channels; 0: there is none
    u32 places;  // 0: there is no task
};

__device__ inline Ahead ahead_of(const Told& told, int task, u32 places, u32 warp, u32 lane) {
    if (task >= told.num_rows * KEY_HEADS) return Ahead{0, 0};
    u64 state = address_at(places + STATES + warp / 4 * 8);
    if (state) state += lane / 8 * 512 + warp % 4 * 128 + lane % 8 * 16;
    return Ahead{state, places};
}

// Ask for a step of a task. channels: of the warp's first one, in bytes of 16-bit numbers. blocks: of 16 tokens, of the
// chunk before the token's.
__device__ inline void ask(int step, u32 to, const Told& told, const Ahead& of, u32 channels, int blocks, u32 lane) {
    u64 nowhere = (u64)told.state;
    if (of.places) {
        if (step < 8) {
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                u64 from = of.state + (step * 16 + r * 4) * 512;
                u32 at = lane / 8 * 128 + (lane % 8 ^ lane / 16 * 2 ^ r % 2 * 4) * 16;
                COPY_STATE(to + r * 512 + at, of.state ? from : nowhere, of.state ? 16 : 0);
            }
        } else if (step < 10) {
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                int own = (step - 8) * 2 + part;
                if (own <= blocks) {
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        u64 from = address_at(of.places + UPDATES + (own * 16 + r * 8 + lane / 4) * 8);
                        u32 at = lane / 8 * 128 + (lane % 8 ^ lane / 8 * 2) * 16;
                        copy16(to + part * 1024 + r * 512 + at, from ? from + channels + lane % 4 * 16 : nowhere, from ? 16 : 0);
                    }
                }
            }
        } else {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                u64 from = address_at(of.places + VALUES + (lane / 4 + 8 * r) * 8);
                copy16(to + r * 512 + lane * 16, from ? from + channels + lane % 4 * 16 : nowhere, from ? 16 : 0);
            }
        }
    }
    commit();
}

// A row of 16-bit numbers, 16 of them from `at` on, as 16 equal rows of the matrix unit's first operand.
__device__ inline Four equal_rows(u32 at, u32 lane) {
    u32 first = get(at + lane % 4 * 4), second = get(at + 16 + lane % 4 * 4);
    return Four{{first, first, second, second}};
}

// What a lane puts into the product of T from four sums [16 tokens, 8 channels]: of tokens 2 i and 8 + 2 i, and of
// those behind each, where the lane is the i-th of four.
__device__ inline void turn(const float (&sum)[4], u32 lane, Two& even, Two& odd) {
    u32 is_odd = lane / 4 % 2;
    u32 first = (lane % 4 * 2 + is_odd) * 4 + lane / 8, second = (lane % 4 * 2 + 1 - is_odd) * 4 + lane / 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        u32 low = bits_of(sum[2 * half]), high = bits_of(sum[2 * half + 1]);
        u32 one = from_lane(is_odd ? high : low, first), other = from_lane(is_odd ? low : high, second);
        even.x[half] = is_odd ? other : one;
        odd.x[half] = is_odd ? one : other;
    }
}

// M and the factors of o of eight tokens of the chunk, and their part of the triangle: `tile` of eight.
__device__ inline void compare(int tile, u32 brought, u32 made, int last, u32 lane) {
    int begin = last / 16 * 16, here = last % 16;  // within the chunk, as `last`
    float alike[4] = {}, asked[4] = {};
#pragma unroll
    for (int step = 0; step < 8; ++step) {
        Four key = square(brought + (begin + lane % 16) * PITCH + lane / 16 * 16 + step * 32);
        Four query = equal_rows(brought + QUERY + step * 32, lane);
        u32 at = brought + (tile * 8 + lane / 4) * PITCH + lane % 4 * 4 + step * 32;
        Two then{{get(at), get(at + 16)}};
        multiply(alike, key, then);
        multiply(asked, query, then);
    }
    int column = tile * 8 + lane % 4 * 2;
    bool is_m = column < begin;
#pragma unroll
    for (int head = 0; head < PER; ++head) {
        u32 sums = brought + SUMS + head * 256, of_head = made + head * MADE_BYTES;
        float own = number(get(sums + last * 4)), then[2] = {number(get(sums + column * 4)), number(get(sums + column * 4 + 4))};
        float scaled[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int row = lane / 4 + i / 2 * 8, at = column + i % 2;
            bool is_seen = row <= here && (is_m || begin + row > at);
            float sum = number(get(sums + (begin + row) * 4)), rate = number(get(brought + RATES + head * 64 + row * 4));
            float left = exponential(is_seen ? less(sum, then[i % 2]) : 0.0f);
            scaled[i] = is_seen ? times(times(rate, left), alike[i]) : 0.0f;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 row = lane / 4 + half * 8;
            if (is_m) {
                put(of_head + row * M_PITCH + column * 2, pack(scaled[2 * half], scaled[2 * half + 1]));
            } else {
                put(of_head + TRIANGLE + row * 64 + (column - begin) * 4, bits_of(scaled[2 * half]));
                put(of_head + TRIANGLE + row * 64 + (column - begin) * 4 + 4, bits_of(scaled[2 * half + 1]));
            }
        }
        if (lane < 4) {
            float f[2];
#pragma unroll
            for (int i = 0; i < 2; ++i)
                f[i] = column + i <= last ? times(exponential(less(own, then[i])), asked[i]) : 0.0f;
            put(of_head + FACTOR + column * 2, pack(f[0], f[1]));
        }
    }
}

// The token's row of T, a column a lane, of two heads a warp; see `octavo.ops.scan.delta_gpu.inverse_rows`.
__device__ inline void invert(int head, u32 made, int here, u32 lane) {
    u32 of_head = made + head * MADE_BYTES, column = lane % 16;
    float rows[16], found = column == 0 ? 1.0f : 0.0f;
    rows[0] = found;
#pragma unroll
    for (u32 line = 1; line < 16; ++line) {
        if ((int)line <= here) {
            float row = column == line ? 1.0f : 0.0f;
#pragma unroll
            for (u32 four = 0; four * 4 < line; ++four) {
                Four below = get4(of_head + TRIANGLE + line * 64 + four * 16);
#pragma unroll
                for (u32 i = 0; i < 4; ++i)
                    if (four * 4 + i < line) row = less(row, times(number(below.x[i]), rows[four * 4 + i]));
            }
            rows[line] = row;
            found = row;
        }
    }
    put(of_head + T_ROW + column * 4, bits_of(found));
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) delta_step(const __grid_constant__ Told told) {
    let_next_begin();
    extern __shared__ __align__(128) unsigned char memory[];
    u32 base = (u32)__cvta_generic_to_shared(memory);
    u32 warp = thread() / 32, lane = thread() % 32, ring = base + warp * (DEPTH * SLOT), made = base + MADE_AT;
    int tasks = told.num_rows * KEY_HEADS, task = block(), by = blocks();
    if (warp == WARPS) {
        find(told, task, base + PLACES_AT, lane);
        together();
        find(told, task + by, base + PLACES_AT + PLACES_BYTES, lane);
        wait_for_before();
        bring(told, task, base + BROUGHT_AT, lane);
        for (int round = 0; task < tasks; ++round, task += by) {
            together();
            int here = (int)(get(base + PLACES_AT + round % 3 * PLACES_BYTES + LAST) % 16);
            find(told, task + 2 * by, base + PLACES_AT + (round + 2) % 3 * PLACES_BYTES, lane);
            some_together(1, THREADS);  // triangles are there
            for (int head = lane / 16; head < PER; head += 2) invert(head, made, here, lane);
            warp_together();
            tell_some(2, THREADS);
            bring(told, task + by, base + BROUGHT_AT + (round + 1) % 2 * BROUGHT_BYTES, lane);
            warp_together();
        }
        return;
    }
    together();
    u32 own_head = warp / 4, of_head = made + own_head * MADE_BYTES;
    u32 channels = ((task % KEY_HEADS * PER + own_head) * SIZE + warp % 4 * 32) * 2;
    Ahead now = ahead_of(told, task, base + PLACES_AT, warp, lane), then;
#pragma unroll
    for (int step = 0; step < DEPTH - 1; ++step) ask(step, ring + step * SLOT, told, now, channels, 0, lane);
    wait_for_before();
    u32 use = 0;  // the ring's place that is read next
    u32 state_at = lane % 4 * 256 + (lane / 4 ^ lane % 4 * 2) * 16;
    u32 update_at = lane % 4 * 128 + (lane / 8 ^ lane % 4 * 2) * 16 + lane / 4 % 2 * 8;
    for (int round = 0; task < tasks; ++round, task += by) {
        together();  // what the scout brings of this task is there, and where all of the next lies; nobody is behind
        u32 brought = base + BROUGHT_AT + round % 2 * BROUGHT_BYTES;
        u32 next_channels = (((task + by) % KEY_HEADS * PER + own_head) * SIZE + warp % 4 * 32) * 2;
        then = ahead_of(told, task + by, base + PLACES_AT + (round + 1) % 3 * PLACES_BYTES, warp, lane);
        int last = (int)(get(now.places + LAST) % CHUNK), here = last % 16, blocks = last / 16;
        for (int tile = warp; tile < 2 * blocks + 2; tile += WARPS) compare(tile, brought, made, last, lane);
        tell_some(1, THREADS);
        u32 square_at = brought + (last / 16 * 16 + lane % 16) * PITCH + lane / 16 * 16;
        float of_key[4][4] = {}, of_query[4][4] = {};
        u32 slot;
#define NEXT(step)                                                                                              \
    arrived<DEPTH - 2>();                                                                                       \
    warp_together(); /* all lanes' copies are there, and all have read what comes next */                       \
    slot = ring + use * SLOT;                                                                                   \
    {                                                                                                           \
        u32 free = ring + (use == 0 ? DEPTH - 1 : use - 1) * SLOT;                                              \
        if ((step) + DEPTH - 1 < ROUND) ask((step) + DEPTH - 1, free, told, now, channels, blocks, lane);            \
        else ask((step) + DEPTH - 1 - ROUND, free, told, then, next_channels, 0, lane);                            \
    }                                                                                                           \
    use = use == DEPTH - 1 ? 0 : use + 1;
#pragma unroll
        for (int step = 0; step < 8; ++step) {
            NEXT(step)
            Four state[4];
#pragma unroll
            for (int r = 0; r < 4; ++r) state[r] = get4(slot + r / 2 * 1024 + r % 2 * 128 + state_at);
            Four key = square(square_at + step * 32), query = equal_rows(brought + QUERY + step * 32, lane);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                Two rounded{{pack(number(state[0].x[j]), number(state[1].x[j])),
                             pack(number(state[2].x[j]), number(state[3].x[j]))}};
                multiply(of_query[j], query, rounded);
                multiply(of_key[j], key, rounded);
            }
        }
        u32 sums = brought + SUMS + own_head * 256, rates = brought + RATES + own_head * 64;
        float own_begun = exponential(number(get(sums + last * 4)));
        float of_m[4][4] = {};
        Two held_updates[4] = {};
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) of_query[j][i] = times(own_begun, of_query[j][i]);
        some_together(2, THREADS);  // T is there, and all that others made
#pragma unroll
        for (int step = 8; step < 10; ++step) {
            NEXT(step)
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                int own = (step - 8) * 2 + part;
                if (own <= blocks) {
                    Two words[2][2];  // of tokens r of two and r of the two that are eight on
#pragma unroll
                    for (u32 r = 0; r < 4; ++r) words[r / 2][r % 2] = get2(slot + part * 1024 + r / 2 * 512 + (update_at ^ r % 2 * 64));
                    Two updates[4];  // of two tokens, and of two others
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        u32 which = j % 2 ? 0x7632 : 0x5410;
                        updates[j] = Two{{bytes_of(words[0][0].x[j / 2], words[0][1].x[j / 2], which),
                                          bytes_of(words[1][0].x[j / 2], words[1][1].x[j / 2], which)}};
                    }
                    if (own < blocks) {
                        Four m = square(of_head + lane % 16 * M_PITCH + lane / 16 * 16 + own * 32);
                        Four f = equal_rows(of_head + FACTOR + own * 32, lane);
#pragma unroll
                        for (int j = 0; j < 4; ++j) {
                            multiply(of_m[j], m, updates[j]);
                            multiply(of_query[j], f, updates[j]);
                        }
                    } else {
#pragma unroll
                        for (int j = 0; j < 4; ++j) held_updates[j] = updates[j];
                    }
                }
            }
        }
        NEXT(10)
        Four value[2] = {get4(slot + lane * 16), get4(slot + 512 + lane * 16)};
        float begun[2], beta[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int token = lane / 4 + 8 * half;
            begun[half] = exponential(number(get(sums + (last - here + token) * 4)));
            beta[half] = number(get(rates + token * 4));
        }
        Two t_even = get2(of_head + T_ROW + lane % 4 * 8), t_odd = get2(of_head + T_ROW + 32 + lane % 4 * 8);
        Four even_t{{t_even.x[0], t_even.x[0], t_odd.x[0], t_odd.x[0]}};
        Four odd_t{{t_even.x[1], t_even.x[1], t_odd.x[1], t_odd.x[1]}};
        u32 own_update[4];  // of columns 2 i and 2 i + 1
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float rest[4], update[4] = {};
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // tokens lane / 4 (i of 0 and 1) and that + 8, channels j and 4 + j of eight
                u32 word = value[i / 2].x[(i % 2) * 2 + j / 2];
                float right = times(begun[i / 2], of_key[j][i]);
                right = times(beta[i / 2], less(widened(j % 2 ? word >> 16 : word & 0xffff), right));
                if ((int)lane / 4 + i / 2 * 8 > here) right = 0.0f;
                rest[i] = less(right, of_m[j][i]);
            }
            Two even, odd;
            turn(rest, lane, even, odd);
            multiply_tf32(update, even_t, even);
            multiply_tf32(update, odd_t, odd);
            own_update[j] = pack(update[0], update[1]);
        }
        Four f = equal_rows(of_head + FACTOR + blocks * 32, lane);
        bool is_mine = here % 8 / 2 == (int)lane % 4;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            u32 both = from_lane(own_update[j], lane / 8);
            u32 one = lane / 4 % 2 ? both >> 16 : both & 0xffff;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32 word = held_updates[j].x[half];
                u32 with = here % 2 ? (word & 0xffff) | one << 16 : (word & 0xffff0000) | one;
                held_updates[j].x[half] = is_mine && here / 8 == half ? with : word;
            }
            multiply(of_query[j], f, held_updates[j]);
        }
        // A lane has channels j and 4 + j of eight: all eight in order.
        u32 mine = channels + lane % 4 * 16;
        u64 goal = address_at(now.places + GOALS + 16);
        if (lane / 4 == 0 && goal) {
            Four result{{pack(of_query[0][0], of_query[1][0]), pack(of_query[2][0], of_query[3][0]),
                         pack(of_query[0][1], of_query[1][1]), pack(of_query[2][1], of_query[3][1])}};
            write(goal + mine, result);
        }
        goal = address_at(now.places + GOALS);
        if (lane / 4 == 1 && goal) {
            Four update{{bytes_of(own_update[0], own_update[1], 0x5410), bytes_of(own_update[2], own_update[3], 0x5410),
                         bytes_of(own_update[0], own_update[1], 0x7632), bytes_of(own_update[2], own_update[3], 0x7632)}};
            write(goal + mine, update);
        }
        goal = address_at(now.places + GOALS + 8);
        if ((int)lane / 4 == here % 8 && goal) {
            if (here < 8) write(goal + mine, value[0]);
            else write(goal + mine, value[1]);
        }
        now = then;
        channels = next_channels;
    }
}
