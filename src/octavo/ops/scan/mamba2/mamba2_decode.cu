// Mamba-2 where many rows decode a token each, with states in two halves. Told of and launched by mamba2_decode.py.
//
// Heads of all rows are dealt to blocks evenly, LEAST together, and a task is up to EACH of a row that share B. A block
// has two scouts, warps that find where every other task's things lie, and make its weights of tokens, ahead of the
// others. The asker fills a ring: the copy engine brings a head's upper half of the state, the asker's lanes the open
// chunk's x. A stage of the ring is one warp's, the taker's: were it another's each time, one could take a stage's
// earlier turn for the one that it waits for, which barriers do not tell apart.
// States, and tokens, are the products' first operand, turned on their way to registers; of the second one all columns
// are alike. So each lane of four has the same sums, and each ends a quarter of them.
//
// Invariant: the operations on a head are those of `mamba2_decode_gpu`, in the same order.

struct Told {
    Map states;  // what is kept of them, as lines of 64 numbers of 16 bits
    u64 rows, query_start, seq_lens;
    const int *state_table, *input_table;
    u64 x, b, total, dt, xbc, given_dt, decay, dt_bias, skip, out, state;
    i64 xbc_row, dt_row;
    float dt_min, dt_max;
    int num_rows, state_columns, input_columns, state_first, input_first;
};

#define SIZE 64
#define STATES 128
#define THREADS (32 * (STAGES + 3))
#define HALF_BYTES (SIZE * STATES * 2)
#define X_PITCH (SIZE * 2 + 16)
#define B_PITCH (STATES * 2 + 16)
#define GATE_PITCH (EACH * 4 + 16)
#define LEAST 4  // heads that are dealt together
// Places in shared memory: stages of a head's state and x; of either scout B, sums and steps of its task's tokens, and
// where they lie; two tasks.
#define STAGE (HALF_BYTES + CHUNK * X_PITCH)
#define TOKENS_AT (STAGES * STAGE)
#define B_AT 0
#define SUMS_AT (B_AT + CHUNK * B_PITCH)
#define STEPS_AT (SUMS_AT + CHUNK * GATE_PITCH)
#define B_PLACES (STEPS_AT + CHUNK * GATE_PITCH)
#define SUM_PLACES (B_PLACES + CHUNK * 8)
#define STEP_PLACES (SUM_PLACES + CHUNK * 8)
#define TOKENS (STEP_PLACES + CHUNK * 8)
#define TASKS_AT (TOKENS_AT + 2 * TOKENS)
// Of a task: words about it, of each head its state's line (-1: none), what is left of the state, its skip, weights of
// tokens; C; and where tokens' x begin.
#define HEADS_AT 48
#define WEIGHTS_AT (HEADS_AT + EACH * 16)
#define C_AT (WEIGHTS_AT + EACH * CHUNK * 2)
#define X_AT (C_AT + STATES * 2)
#define TASK (X_AT + CHUNK * 8)
#define BARRIERS_AT (TASKS_AT + 2 * TASK)
#define FULL (BARRIERS_AT)                // of each stage
#define EMPTY (FULL + STAGES * 8)         // of each stage
#define FOUND (EMPTY + STAGES * 8)        // of each task: where things lie
#define WEIGHED (FOUND + 16)              // of each task
#define FREE (WEIGHED + 16)               // of each task: its place may be put over
#define NONE 0xffffffffu
// Words about a task. Two are where the token's x, B, sums and steps are kept, 0 if they are not.
enum { COUNT, SEEN, HEAD, TOKEN, GOAL, B_GOAL = 6, TOTAL_GOAL = 8, DT_GOAL = 10 };

// A lane has both of two rows, of four squares that all lanes of four have alike. Neighbours' rows: one lane packs both
// of the upper, the other of the lower.
__device__ inline float of_quarter(const float (&sums)[4][4], int i, u32 quarter) {
    float low = quarter & 1 ? sums[1][i] : sums[0][i], high = quarter & 1 ? sums[3][i] : sums[2][i];
    return quarter & 2 ? high : low;
}
__device__ inline u32 neighbours(float upper, float lower, u32 lane) {
    bool is_odd = lane / 4 % 2;
    float other = number(from_lane(bits_of(is_odd ? upper : lower), lane ^ 4));
    return is_odd ? pack(other, lower) : pack(upper, other);
}
// In bytes, where what `neighbours` gave lies among 64 numbers of 16 bits.
__device__ inline u32 pair_at(u32 lane) { return (lane % 4 * 16 + lane / 4 % 2 * 8 + lane / 8 * 2) * 2; }
// Of two numbers of 16 bits, those of the tokens that are seen.
__device__ inline u32 mask_of(int token, int seen) { return token + 1 < seen ? 0xffffffffu : token < seen ? 0xffffu : 0; }

// A task: `count` heads from `first` on, of `row`. count 0: there is none.
struct Task { int row, first, count; };

// From head `next` of all rows on, of rows that decode one token; `next` is behind it then. most: heads of the task.
__device__ inline Task next_task(const Told& told, int& next, int end, int most) {
    while (next < end) {
        int row = next / HEADS, first = next % HEADS;
        if (read1(told.query_start + row * 4 + 4) - read1(told.query_start + row * 4) != 1) {
            next = (row + 1) * HEADS;
            continue;
        }
        int count = min(min(most, EACH - first % EACH), end - next);
        next += count;
        return Task{row, first, count};
    }
    return Task{0, 0, 0};
}

// Rows up to the last one that decodes one token.
__device__ inline int count_rows(const Told& told) {
    int count = 0;
    for (int row = thread() % 32; row < told.num_rows; row += 32)
        if (read1(told.query_start + row * 4 + 4) - read1(told.query_start + row * 4) == 1) count = row + 1;
#pragma unroll
    for (u32 apart = 16; apart > 0; apart /= 2) count = max(count, (int)from_lane(count, thread() % 32 ^ apart));
    return count;
}

// Find where a task's things lie, and ask for those of which weights are made. All lanes of a scout; own: its places.
__device__ inline void find(const Told& told, const Task& task, u32 own, u32 at, u32 found, bool is_first) {
    constexpr Form states{STATE_FORM}, xs{X_FORM}, bs{B_FORM}, totals{TOTAL_FORM}, dts{DT_FORM};
    u32 lane = thread() % 32;
    int table_row = (int)read1(told.rows + (i64)task.row * 8), last = (int)read1(told.seq_lens + task.row * 4) - 1;
    int token = (int)read1(told.query_start + task.row * 4), border = last / CHUNK * CHUNK, seen = last - border + 1, held;
    int group = task.first / PER, first_part = told.input_first;
    const int* table = told.input_table + (i64)table_row * told.input_columns;
    u64 fresh = told.xbc + token * told.xbc_row * 2;
    if ((int)lane < task.count) {
        const int* kept = told.state_table + (i64)table_row * told.state_columns;
        i64 where = 0;
        held = 0;
        if (border > 0) where = place(kept, told.state_first, border / CHUNK - 1, 0, (task.first + lane) * STATES, SIZE, states, held);
        put(at + HEADS_AT + lane * 16, held > 0 ? (u32)(where / (SIZE / 2)) : NONE);
    }
    for (int here = lane; here < seen; here += 32) {
        int entry = (border + here) / BLOCK, offset = (border + here) % BLOCK;
        bool is_own = here == seen - 1;
        u64 x_at = told.x + place(table, first_part, entry, offset, task.first, SIZE, xs, held) * 2;
        if (is_own) put_address(at + GOAL * 4, held > 0 ? x_at : 0), x_at = fresh + task.first * (SIZE * 2);
        put_address(at + X_AT + here * 8, x_at);
        u64 b_at = told.b + place(table, first_part, entry, offset, group, STATES, bs, held) * 2;
        if (is_own) put_address(at + B_GOAL * 4, held > 0 ? b_at : 0), b_at = fresh + (HEADS * SIZE + group * STATES) * 2;
        put_address(own + B_PLACES + here * 8, b_at);
        u64 dt_at = told.dt + place(table, first_part, entry, offset, task.first, 1, dts, held) * 4;
        u64 total_at = told.total + place(table, first_part, entry, offset, task.first, 1, totals, held) * 4;
        if (is_own) put_address(at + DT_GOAL * 4, dt_at), put_address(at + TOTAL_GOAL * 4, held > 0 ? total_at : 0);
        put_address(own + STEP_PLACES + here * 8, dt_at), put_address(own + SUM_PLACES + here * 8, total_at);
    }
    if (lane == 0)
        put(at + COUNT * 4, task.count), put(at + SEEN * 4, seen), put(at + HEAD * 4, task.first), put(at + TOKEN * 4, token);
    warp_together();
    if (lane == 0) arrive(found);
    for (int here = lane / 4; here < seen - 1; here += 8) {
        u32 part = lane % 4 * 16, to = here * GATE_PITCH + part;
        if ((int)part >= task.count * 4) continue;
        copy16(own + SUMS_AT + to, address_at(own + SUM_PLACES + here * 8) + part, 16);
        copy16(own + STEPS_AT + to, address_at(own + STEP_PLACES + here * 8) + part, 16);
    }
    for (int here = lane / 16; here < seen - 1; here += 2)
        copy16(own + B_AT + here * B_PITCH + lane % 16 * 16, address_at(own + B_PLACES + here * 8) + lane % 16 * 16, 16);
    if (is_first) wait_for_before();
    if (lane < 16) copy16(own + B_AT + (seen - 1) * B_PITCH + lane * 16, address_at(own + B_PLACES + (seen - 1) * 8) + lane * 16, 16);
    commit();
}

// Make weights of the tokens of a task that was found, and keep what the token brings but its x.
__device__ inline void weigh(const Told& told, const Task& task, u32 own, u32 at, u32 weighed) {
    u32 lane = thread() % 32, quarter = lane % 4;
    int seen = get(at + SEEN * 4), token = get(at + TOKEN * 4), group = task.first / PER;
    u64 fresh = told.xbc + token * told.xbc_row * 2;
    bool is_head = (int)lane < task.count;
    float given = 0, bias = 0, rate = 0, skip = 0;
    if (is_head) {
        u32 head = task.first + lane;
        given = widened(read_half(told.given_dt + (token * told.dt_row + head) * 2)), bias = number(read1(told.dt_bias + head * 4));
        rate = number(read1(told.decay + head * 4)), skip = number(read1(told.skip + head * 4));
    }
    if (lane < STATES / 8) put4(at + C_AT + lane * 16, read(fresh + (HEADS * SIZE + (GROUPS + group) * STATES) * 2 + lane * 16));
    float step = softplus(plus(given, bias));
    step = step > told.dt_min ? step : told.dt_min;
    step = step < told.dt_max ? step : told.dt_max;
    warp_together();
    arrived<0>();
    warp_together();
    float before = seen > 1 && is_head ? number(get(own + SUMS_AT + (seen - 2) * GATE_PITCH + lane * 4)) : 0.0f;
    float sum = plus(before, times(step, rate)), alike[4][4] = {};
#pragma unroll
    for (u32 k = 0; k < STATES / 16; ++k) {
        Two c{{get(at + C_AT + k * 32 + quarter * 4), get(at + C_AT + k * 32 + 16 + quarter * 4)}};
#pragma unroll
        for (u32 i = 0; i < 4; ++i) multiply(alike[i], square(own + B_AT + (i * 16 + lane % 16) * B_PITCH + (k * 2 + lane / 16) * 16), c);
    }
    float mine[2] = {of_quarter(alike, 0, quarter), of_quarter(alike, 2, quarter)};
#pragma unroll 4
    for (int head = 0; head < task.count; ++head) {
        float own_sum = number(from_lane(bits_of(sum), head)), own_step = number(from_lane(bits_of(step), head)), weight[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int here = quarter * 16 + lane / 4 + i * 8;
            u32 gate = here * GATE_PITCH + head * 4;
            bool is_own = here == seen - 1;
            float total = is_own ? own_sum : number(get(own + SUMS_AT + gate)), taken = is_own ? own_step : number(get(own + STEPS_AT + gate));
            weight[i] = here < seen ? times(times(exponential(less(own_sum, total)), mine[i]), taken) : 0.0f;
        }
        put(at + WEIGHTS_AT + head * (CHUNK * 2) + pair_at(lane), neighbours(weight[0], weight[1], lane));
    }
    if (is_head) put(at + HEADS_AT + lane * 16 + 4, bits_of(exponential(sum))), put(at + HEADS_AT + lane * 16 + 8, bits_of(skip));
    u64 total_goal = address_at(at + TOTAL_GOAL * 4), dt_goal = address_at(at + DT_GOAL * 4), b_goal = address_at(at + B_GOAL * 4);
    if (is_head && total_goal) write1(total_goal + lane * 4, bits_of(sum)), write1(dt_goal + lane * 4, bits_of(step));
    if (task.first % PER == 0 && b_goal && lane < STATES / 8)  // the first of those that share B
        write(b_goal + lane * 16, get4(own + B_AT + (seen - 1) * B_PITCH + lane * 16));
    warp_together();
    if (lane == 0) arrive(weighed);
}

// Ask for a task's heads, one after the other. `stage` and `round` go on; `is_first`: nothing was asked before.
__device__ inline void ask(const Told& told, u32 base, u32 at, u32& stage, u32& round, bool is_first) {
    u32 lane = thread() % 32;
    int count = get(at + COUNT * 4), seen = get(at + SEEN * 4);
    u64 x_at[CHUNK / 4];  // of every fourth token, and of 16 bytes of it
#pragma unroll
    for (int i = 0; i < CHUNK / 4; ++i) {
        int here = i * 4 + lane / 8;
        x_at[i] = here < seen ? address_at(at + X_AT + here * 8) + lane % 8 * 16 : 0;
    }
    if (is_first) {  // states that earlier steps kept, before the kernel ahead ends
        for (int head = 0; lane == 0 && head < count && head < STAGES; ++head) {
            u32 line = get(at + HEADS_AT + head * 16);
            if (line != NONE) fetch_box(told.states, told.state, line, base + head * STAGE, base + FULL + head * 8);
        }
        wait_for_before();
    }
    for (int head = 0; head < count; ++head) {
        u32 to = base + stage * STAGE, full = base + FULL + stage * 8, line = get(at + HEADS_AT + head * 16);
        if (round) wait_for(base + EMPTY + stage * 8, round - 1 & 1);
        if (lane == 0) {
            expect(full, line != NONE ? HALF_BYTES : 0);
            if (line != NONE && !(is_first && head < STAGES)) fetch_box(told.states, told.state, line, to, full);
        }
        u32 own = to + HALF_BYTES + lane / 8 * X_PITCH + lane % 8 * 16;
#pragma unroll
        for (int i = 0; i < CHUNK / 4; ++i)
            if (i * 4 + (int)lane / 8 < seen) copy16(own + i * (4 * X_PITCH), x_at[i] + head * (SIZE * 2), 16);
        arrive_behind_copies(full);
        if (++stage == STAGES) stage = 0, ++round;
    }
}

// Results of a head; and its token's x is kept. at: the task; own: the stage.
__device__ inline void take(const Told& told, u32 at, u32 own, int head) {
    u32 lane = thread() % 32, quarter = lane % 4, about = at + HEADS_AT + head * 16, weights = at + WEIGHTS_AT + head * (CHUNK * 2);
    int seen = get(at + SEEN * 4);
    bool has_state = get(about) != NONE;
    float left = number(get(about + 4)), skip = number(get(about + 8)), sums[4][4] = {};
#pragma unroll
    for (u32 k = 0; k < STATES / 16; ++k) {
        Two c{{get(at + C_AT + k * 32 + quarter * 4), get(at + C_AT + k * 32 + 16 + quarter * 4)}};
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            u32 line = k * 16 + lane / 16 * 8 + lane % 8;
            Four state = square_turned(own + line * 128 + ((i * 2 + lane / 8 % 2) ^ lane % 8) * 16);
            if (!has_state) state = Four{{0, 0, 0, 0}};
            multiply(sums[i], state, c);
        }
    }
#pragma unroll
    for (u32 i = 0; i < 16; ++i) sums[i / 4][i % 4] = times(left, sums[i / 4][i % 4]);
    u32 xs = own + HALF_BYTES;
#pragma unroll
    for (u32 k = 0; k < CHUNK / 16; ++k) {
        Two weight{{get(weights + k * 32 + quarter * 4), get(weights + k * 32 + 16 + quarter * 4)}};
        int token = k * 16 + quarter * 2;
        u32 low = mask_of(token, seen), high = mask_of(token + 8, seen);
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            Four x = square_turned(xs + (k * 16 + lane / 16 * 8 + lane % 8) * X_PITCH + (i * 2 + lane / 8 % 2) * 16);
            multiply(sums[i], Four{{x.x[0] & low, x.x[1] & low, x.x[2] & high, x.x[3] & high}}, weight);
        }
    }
    u32 fresh = xs + (seen - 1) * X_PITCH, mine = get(fresh + lane * 4);
    float result[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // of channels quarter * 16 + lane / 4, and eight on
        u32 channel = quarter * 16 + lane / 4 + i * 8, both = get(fresh + channel / 2 * 4);
        result[i] = plus(of_quarter(sums, i * 2, quarter), times(skip, widened(channel % 2 ? both >> 16 : both & 0xffff)));
    }
    u32 both = neighbours(result[0], result[1], lane);
    int first = get(at + HEAD * 4), token = get(at + TOKEN * 4);
    u64 goal = address_at(at + GOAL * 4);
    write1(told.out + ((i64)(token * HEADS + first + head) * SIZE) * 2 + pair_at(lane), both);
    if (goal) write1(goal + head * (SIZE * 2) + lane * 4, mine);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) mamba2_decode(const __grid_constant__ Told told) {
    let_next_begin();
    extern __shared__ __align__(1024) unsigned char memory[];
    u32 base = (u32)__cvta_generic_to_shared(memory), warp = thread() / 32, lane = thread() % 32;
    if (thread() == 0) {
        for (u32 i = 0; i < STAGES; ++i) prepare(base + FULL + i * 8, 1 + 32), prepare(base + EMPTY + i * 8, 1);
        for (u32 i = 0; i < 2; ++i) prepare(base + FOUND + i * 8, 1), prepare(base + WEIGHED + i * 8, 1), prepare(base + FREE + i * 8, STAGES + 1);
        prepared();
    }
    together();
    if (warp >= STAGES + 1) {
        i64 all = (i64)count_rows(told) * (HEADS / LEAST);
        int next = (int)(all * block() / blocks()) * LEAST, end = (int)(all * (block() + 1) / blocks()) * LEAST;
        u32 turn = warp - STAGES - 1, at = base + TASKS_AT + turn * TASK, own = base + TOKENS_AT + turn * TOKENS;
        Task task = next_task(told, next, end, LEAST);  // the first one is soon weighed
        if (turn) task = next_task(told, next, end, EACH);
        for (u32 n = 0;; ++n) {
            if (n) wait_for(base + FREE + turn * 8, n - 1 & 1);
            if (!task.count) {
                if (lane == 0) put(at + COUNT * 4, 0), arrive(base + FOUND + turn * 8), arrive(base + WEIGHED + turn * 8);
                return;
            }
            find(told, task, own, at, base + FOUND + turn * 8, n == 0);
            weigh(told, task, own, at, base + WEIGHED + turn * 8);
            next_task(told, next, end, EACH);
            task = next_task(told, next, end, EACH);
        }
    }
    if (warp == STAGES) {
        u32 stage = 0, round = 0;
        for (u32 n = 0;; ++n) {
            u32 turn = n % 2, at = base + TASKS_AT + turn * TASK;
            wait_for(base + FOUND + turn * 8, n / 2 & 1);
            if (!get(at + COUNT * 4)) return commit(), arrived<0>();  // no lane ends before its copies are there
            ask(told, base, at, stage, round, n == 0);
            warp_together();
            if (lane == 0) arrive(base + FREE + turn * 8);
        }
    }
    wait_for_before();
    for (u32 n = 0, stage = 0, round = 0;; ++n) {
        u32 turn = n % 2, at = base + TASKS_AT + turn * TASK;
        wait_for(base + WEIGHED + turn * 8, n / 2 & 1);
        int count = get(at + COUNT * 4);
        if (!count) return;
        for (int head = 0; head < count; ++head) {
            if (stage == warp) {
                wait_for(base + FULL + stage * 8, round++ & 1);
                take(told, at, base + stage * STAGE, head);
                warp_together();
                if (lane == 0) arrive(base + EMPTY + stage * 8);
            }
            stage = stage == STAGES - 1 ? 0 : stage + 1;
        }
        warp_together();
        if (lane == 0) arrive(base + FREE + turn * 8);
    }
}
