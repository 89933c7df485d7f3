// What the scout of a block of delta_step.cu does, ahead of it in one text: finds where things lie, brings and norms what
// others share, and makes T. See there for tasks and steps.

#define WARPS (4 * PER)  // that compute
#define THREADS (32 * WARPS + 32)
#if DEPTH > 4
#error "what is asked for of the task ahead comes with its updates at the earliest, and is of its states"
#endif
#define SLOT 2048
#define ROUND 11  // steps of a task: eight of 16 rows of the state, two of 32 tokens' updates, one of values

struct Told {
    const u16 *qkv, *a, *b;
    const float *decay, *dt_bias;
    u16* out;
    const i64* rows;
    const int *query_start, *seq_lens, *state_table, *input_table;
    float* state;
    u16 *key_kept, *value_kept, *update_kept;
    float *total_kept, *rate_kept;
    i64 qkv_row, a_row, b_row;
    int state_columns, input_columns, state_first, input_first, num_rows;
    float scale;
};

// In shared memory, of a block: rings; what the scout brings of two tasks: the chunk's keys, the query, of each head the
// chunk's sums and the rates of the token's block of 16; what warps make of one task: of each head M, the factors of o,
// T's row, and the triangle; where two tasks' things lie.
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
    __device__ bool is_there() const { return next == token + 1; }  // else it is padding, or another kernel's
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

// Ask for what all warps share of a task and earlier steps kept: the chunk's keys, sums and rates before the token.
__device__ inline void bring_kept(const Told& told, const Row& row, int task, u32 to, u32 lane) {
    constexpr Form keys{KEY_FORM}, totals{TOTAL_FORM}, rates{RATE_FORM};
    if (!row.is_there()) return;
    int last = row.last(), border = last / CHUNK * CHUNK, begin = last / 16 * 16, key_head = task % KEY_HEADS;
    int first_head = key_head * PER;
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
    commit();
}

// Put what the token brings beside it, when that is there, and keep it: its key, sums and rates.
__device__ inline void bring_own(const Told& told, const Row& row, int task, u32 to, u32 lane) {
    constexpr Form keys{KEY_FORM}, totals{TOTAL_FORM}, rates{RATE_FORM};
    if (!row.is_there()) return;
    int last = row.last(), border = last / CHUNK * CHUNK, key_head = task % KEY_HEADS;
    int own_head = key_head * PER + (int)(lane % PER);
    const u16* own = told.qkv + row.token * told.qkv_row + key_head * SIZE + lane % 16 * 8;
    float bias = told.dt_bias[own_head], decay = told.decay[own_head];
    Sought key_goal = seek_token(told, row, last, keys), total_goal = seek_token(told, row, last, totals);
    Sought rate_goal = seek_token(told, row, last, rates);
    int key_block = *key_goal.entry, total_block = *total_goal.entry, rate_block = *rate_goal.entry;
    Four given = read((u64)(lane < 16 ? own : own + KEY_HEADS * SIZE));
    float x = widened(told.a[row.token * told.a_row + own_head]), y = widened(told.b[row.token * told.b_row + own_head]);
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

// The token's row of T, a column a lane, of two heads a warp; see `octavo.ops.scan.delta.scan_gpu.inverse_rows`.
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
