// The gated delta rule over prompts: all of a chunk that needs no state. Told of by delta_prepare.py.
//
// A block has a chunk of a row and a head of its keys, with those of the values that share it. It norms the step's q and
// k, sums gates, and makes M, T and the factors of o; of the chunk's tokens before the step it reads what was kept. M and
// the factors come of ten squares of 16 by 16 tokens, both of a square's by the same warp, which then has one part of the
// keys in registers for both products, and one exponential for both factors.
//
// Invariant: the operations on a number are those of `normalize_keys`, `scan_gates` and `delta_chunks`, in the same
// order. Nothing is written that `delta_prompts` does not read.

#define THREADS 256
#define WARPS 8
#define PITCH 256
#define QUERIES (CHUNK * PITCH)
#define TRIANGLES (2 * CHUNK * PITCH)
#define SUMS (TRIANGLES + PER * 4 * 1024)
#define RATES (SUMS + PER * CHUNK * 4)

struct Told {
    const u16 *qkv, *a, *b;
    const float *decay, *dt_bias;
    u16 *query, *key;       // [T, KEY_HEADS, SIZE]
    float *total, *rate;    // [T, HEADS]
    u16 *before, *factor;   // [blocks of 16 tokens, HEADS, 16, CHUNK]
    float* inverse;         // [blocks, HEADS, 16, 16]
    const i64* rows;
    const int *query_start, *seq_lens, *num_ahead, *input_table;
    const u16* key_kept;
    float *total_kept, *rate_kept;
    i64 qkv_row, a_row, b_row;
    int input_columns, input_first, num_rows;
    float scale;
};

// A row's chunk.
struct Part {
    int token, end, computed, begin, first_block, key_head;  // first_block: of the chunk, where those before are none
    const int* inputs;
    __device__ bool is_new(int at) const { return at >= computed && at < end; }
    __device__ i64 fresh(int at) const { return (i64)token + at - computed; }
};

__device__ inline Part part_of(const Told& told) {
    // The first ones last: they are walked first, and then lie in the L2.
    int slot = (blocks() - 1 - block()) / KEY_HEADS, reach = 1, ahead = *told.num_ahead, row = ahead;
    if (ahead >= told.num_rows) return Part{};
    int before = told.query_start[ahead];
    while (reach < told.num_rows - ahead) reach *= 2;
    for (; reach > 0; reach /= 2) {
        int next = row + reach;
        if (next < told.num_rows && (told.query_start[next] - before) / CHUNK + 2 * (next - ahead) <= slot) row = next;
    }
    Part part;
    part.token = told.query_start[row], part.end = told.seq_lens[row];
    part.computed = part.end - (told.query_start[row + 1] - part.token);
    part.begin = part.computed / CHUNK * CHUNK + (slot - (part.token - before) / CHUNK - 2 * (row - ahead)) * CHUNK;
    part.first_block = part.token / 16 + 2 * row + (part.begin - part.computed / 16 * 16) / 16;
    part.key_head = block() % KEY_HEADS;
    part.inputs = told.input_table + told.rows[row] * told.input_columns;
    return part;
}

// Where what a token brought is kept, of run 0.
__device__ inline u64 kept_at(const Told& told, const Part& part, int at, const Form& form, int& held) {
    return place(part.inputs, told.input_first, at / BLOCK, at % BLOCK, 0, SIZE, form, held);
}

typedef Four Given[CHUNK / WARPS];

// Ask for queries and keys of the chunk: of one token in eight a warp, eight channels a lane.
__device__ inline void ask(const Told& told, const Part& part, Given& given, u32 warp, u32 lane) {
    constexpr Form keys{KEY_FORM};
    u64 inner = (u64)(told.qkv + (lane / 16 * KEY_HEADS + part.key_head) * SIZE + lane % 16 * 8);
    u64 from = inner + part.fresh(part.begin + warp) * told.qkv_row * 2, step = told.qkv_row * (2 * WARPS);
#pragma unroll
    for (int i = 0; i < CHUNK / WARPS; ++i, from += step) {
        int at = part.begin + i * WARPS + warp, held = 0;
        given[i] = Four{};
        if (part.is_new(at)) {
            given[i] = read(from);
        } else if (at < part.computed && lane >= 16) {
            u64 where = kept_at(told, part, at, keys, held) + part.key_head * SIZE + lane % 16 * 8;
            if (held > 0) given[i] = read((u64)(told.key_kept + where));
        }
    }
}

// Of `count` numbers a lane gives those that belong to its partner, `apart` lanes on, and adds the partner's to the rest.
template <int COUNT> __device__ inline void halve(float (&total)[CHUNK / WARPS], u32 apart, u32 lane) {
    bool is_high = lane & apart;
#pragma unroll
    for (int i = 0; i < COUNT / 2; ++i) {
        float mine = is_high ? total[COUNT / 2 + i] : total[i], other = is_high ? total[i] : total[COUNT / 2 + i];
        total[i] = plus(mine, number(from_lane(bits_of(other), lane ^ apart)));
    }
}

// The step's are written of norm 1, and all go to shared memory. Of each two lanes one token's sum is made of all parts.
__device__ inline void norm(const Told& told, const Part& part, Given& given, u32 base, u32 warp, u32 lane) {
    float total[CHUNK / WARPS];
#pragma unroll
    for (int i = 0; i < CHUNK / WARPS; ++i) total[i] = sum_of_squares(given[i]);
    halve<8>(total, 8, lane);
    halve<4>(total, 4, lane);
    halve<2>(total, 2, lane);
    float factor = one_over_norm(plus(total[0], number(from_lane(bits_of(total[0]), lane ^ 1))));
    if (lane < 16) factor = times(factor, told.scale);
    i64 goal = (part.fresh(part.begin + warp) * KEY_HEADS + part.key_head) * SIZE + lane % 16 * 8;
    u64 first = (u64)((lane < 16 ? told.query : told.key) + goal);
    u32 to = base + (lane < 16 ? QUERIES : 0) + warp * PITCH + (lane % 16 ^ warp) * 16;
#pragma unroll
    for (int i = 0; i < CHUNK / WARPS; ++i) {
        float own = number(from_lane(bits_of(factor), lane / 16 * 16 + 2 * i));
        if (part.is_new(part.begin + i * WARPS + warp)) {
            given[i] = scaled(given[i], own);
            write(first + i * WARPS * KEY_HEADS * SIZE * 2, given[i]);
        }
        put4((to ^ i % 2 * 32) + i * WARPS * PITCH, given[i]);
    }
}

// What each token adds to a head's sum, or for one before the step its sum; and rates. A thread has one token.
__device__ inline void gate(const Told& told, const Part& part, u32 base, bool keeps) {
    constexpr Form totals{TOTAL_FORM}, rates{RATE_FORM};
    if (thread() >= PER * CHUNK) return;
    int own = thread() / CHUNK, at = part.begin + thread() % CHUNK, head = part.key_head * PER + own, held;
    float step = 0.0f, rate = 0.0f;
    if (part.is_new(at)) {
        i64 token = part.fresh(at);
        float x = widened(told.a[token * told.a_row + head]), y = widened(told.b[token * told.b_row + head]);
        step = times(told.decay[head], softplus(plus(x, told.dt_bias[head])));
        rate = over(1.0f, plus(1.0f, exponential(less(0.0f, y))));
        told.rate[token * HEADS + head] = rate;
        if (keeps) {
            u64 goal = kept_at(told, part, at, rates, held);
            if (held > 0) told.rate_kept[goal + head] = rate;
        }
    } else if (at < part.computed) {
        u64 where = kept_at(told, part, at, totals, held);
        step = held > 0 ? told.total_kept[where + head] : 0.0f;
        where = kept_at(told, part, at, rates, held);
        rate = held > 0 ? told.rate_kept[where + head] : 0.0f;
    }
    put(base + SUMS + thread() * 4, bits_of(step));
    put(base + RATES + thread() * 4, bits_of(rate));
}

// A head's sums, one token behind the other.
__device__ inline void sum_up(const Part& part, u32 sums) {
    float sum = 0.0f;
    int known = part.computed - part.begin;
#pragma unroll 4
    for (int four = 0; four < CHUNK / 4; ++four) {
        Four steps = get4(sums + four * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float step = number(steps.x[i]);
            sum = four * 4 + i < known ? step : plus(sum, step);
            steps.x[i] = bits_of(sum);
        }
        put4(sums + four * 16, steps);
    }
}

// Of 16 tokens, T of two heads at once: a column a lane; see `octavo.ops.scan.delta.scan_gpu.inverse_rows`.
__device__ inline void invert(u32 triangle, float* goal) {
    u32 column = thread() % 16;
    float rows[16];
#pragma unroll
    for (u32 line = 0; line < 16; ++line) {
        float row = column == line ? 1.0f : 0.0f;
#pragma unroll
        for (u32 four = 0; four * 4 < line; ++four) {
            Four below = get4(triangle + line * 64 + four * 16);
#pragma unroll
            for (u32 i = 0; i < 4; ++i)
                if (four * 4 + i < line) row = less(row, times(number(below.x[i]), rows[four * 4 + i]));
        }
        rows[line] = row;
        goal[line * 16 + column] = row;
    }
}

// Of 16 tokens, beside 16 that are not behind them, the products of keys and of queries with keys: a lane has four
// neighbouring columns of two lines, for which column n of product j is token 4 (n / 2) + 2 j + n % 2. Parts of 16 bytes
// lie by exclusive or: neither of lines that follow one another nor of such columns do two meet in a bank.
__device__ inline void compare(float (&of_key)[2][4], float (&of_query)[2][4], u32 own, u32 key) {
#pragma unroll
    for (int step = 0; step < 8; ++step) {
        Four column = square(key ^ step * 32), line = square(own ^ step * 32), asked = square((own ^ step * 32) + QUERIES);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            multiply(of_key[j], line, Two{{column.x[2 * j], column.x[2 * j + 1]}});
            multiply(of_query[j], asked, Two{{column.x[2 * j], column.x[2 * j + 1]}});
        }
    }
}

// Of a head the factors of o and M, or what T is made of: of 16 tokens by 16, all that comes of their products. own, rate:
// of a lane's two lines; then: sums of its columns; last: lines that there are; triangle: where T's goes, 0 off the
// diagonal; before, factor: where the lane's parts of M and of the factors go.
__device__ inline void scale(const float (&of_key)[2][4], const float (&of_query)[2][4], const float (&own)[2],
                             const float (&rate)[2], const Four& then, int last, u32 triangle, u64 before, u64 factor, u32 lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int row = lane / 4 + half * 8, column = lane % 4 * 4;
        float m[4], f[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float left = exponential(less(own[half], number(then.x[i])));
            m[i] = times(times(rate[half], left), of_key[i / 2][half * 2 + i % 2]);
            f[i] = times(left, of_query[i / 2][half * 2 + i % 2]);
        }
        if (triangle || last < 16) {
            int seen = row >= last ? 0 : triangle ? row - column : 4;  // columns before the line's own
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (i >= seen) m[i] = 0.0f;
                if (row >= last || (triangle && i > seen)) f[i] = 0.0f;
            }
        }
        if (triangle) put4(triangle + row * 64 + column * 4, Four{{bits_of(m[0]), bits_of(m[1]), bits_of(m[2]), bits_of(m[3])}});
        else write2(before + half * 8 * CHUNK * 2, Two{{pack(m[0], m[1]), pack(m[2], m[3])}});
        write2(factor + half * 8 * CHUNK * 2, Two{{pack(f[0], f[1]), pack(f[2], f[3])}});
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) delta_prepare(const __grid_constant__ Told told) {
    constexpr Form totals{TOTAL_FORM};
    extern __shared__ __align__(256) unsigned char memory[];
    u32 base = (u32)__cvta_generic_to_shared(memory), lane = thread() % 32, warp = from_lane(thread() / 32, 0);
    wait_for_before();  // the rows ahead may be counted by the kernel before
    let_next_begin();
    Part part = part_of(told);
    if (part.begin >= part.end || part.computed < 0 || part.computed >= part.end) return;
    bool keeps = part.begin >= (part.end - 1) / CHUNK * CHUNK - CHUNK;  // chunks before are kept by no table
    {
        Given given;
        ask(told, part, given, warp, lane);
        gate(told, part, base, keeps);
        norm(told, part, given, base, warp, lane);
    }
    together();
    if (thread() < PER) sum_up(part, base + SUMS + thread() * CHUNK * 4);
    warp_together();
    // Of ten squares of 16 by 16 tokens four warps have one of the diagonal, and T; four have one off it, and half the
    // heads of another.
    bool is_diagonal = warp >= 4;
    int own = warp % 4, block = is_diagonal ? own : 1 + (own + 1) / 2, other = is_diagonal ? own : own == 2, head = 0, by = 1;
    u32 line = lane % 16, own_at = base + line * PITCH + (lane / 16 ^ line % 8 ^ line / 8 * 2) * 16;
    line = lane % 8 / 2 * 4 + lane / 16 * 2 + lane % 2;
    u32 key_at = base + line * PITCH + (lane / 8 % 2 ^ line % 8 ^ line / 8 * 2) * 16;
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn) {
        int first = block * 16, last = min(part.end - part.begin - first, 16);  // tokens that there are
        bool is_made = last > 0 && part.begin + first >= part.computed / 16 * 16;
        float of_key[2][4] = {}, of_query[2][4] = {};
        compare(of_key, of_query, own_at + first * PITCH, key_at + other * 16 * PITCH);
        if (turn == 0) {
            together();  // sums are there
            if (thread() < PER * CHUNK && part.is_new(part.begin + thread() % CHUNK)) {
                int at = part.begin + thread() % CHUNK, head = part.key_head * PER + thread() / CHUNK, held;
                float sum = number(get(base + SUMS + thread() * 4));
                told.total[part.fresh(at) * HEADS + head] = sum;
                u64 goal = keeps ? kept_at(told, part, at, totals, held) : 0;
                if (keeps && held > 0) told.total_kept[goal + head] = sum;
            }
            warp_together();
        }
        i64 made = ((i64)(part.first_block + block) * HEADS + part.key_head * PER) * 16;
        i64 goal = ((made + head * 16 + lane / 4) * CHUNK + other * 16 + lane % 4 * 4) * 2;
        u32 sums = base + SUMS + head * CHUNK * 4, triangle = is_diagonal ? base + TRIANGLES + (head * 4 + block) * 1024 : 0;
        if (is_made)
#pragma unroll 1
            for (; head < PER; head += by, goal += by * 16 * CHUNK * 2, sums += by * CHUNK * 4) {
                float own_sum[2], rate[2];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    own_sum[half] = number(get(sums + (first + lane / 4 + half * 8) * 4));
                    rate[half] = number(get(sums + RATES - SUMS + (first + lane / 4 + half * 8) * 4));
                }
                Four then = get4(sums + other * 64 + lane % 4 * 16);
                scale(of_key, of_query, own_sum, rate, then, last, triangle, (u64)told.before + goal, (u64)told.factor + goal, lane);
                if (is_diagonal) triangle += 4 * 1024;
            }
        if (is_diagonal) {
            if (!is_made) return;
            warp_together();
            for (int head = lane / 16; head < PER; head += 2)
                invert(base + TRIANGLES + (head * 4 + block) * 1024, told.inverse + (made + head * 16) * 16);
        }
        if (is_diagonal || own % 2 >= PER) return;
        block = 3, other = 1 + own / 2, head = own % 2, by = 2;
    }
}
