// Mamba-2's states behind chunks that decoding ended, in two halves. Told of and launched by mamba2_advance.py.
//
// A task is EACH heads of a row and a layer that share B; a block takes tasks in turn, and a head of one a step. A warp
// has 16 of a head's 128 states. What steps need comes by asynchronous copies, two steps ahead and on past a task's end:
// of the old state each warp brings its own part, into a place that it alone reads; of the tokens' x all bring some.
// Column n of the product j of eight is channel 8 (n / 2 + j / 4 * 4) + j % 4 * 2 + n % 2, so that a lane has 16 bytes of
// a half in a row; x lies in shared memory in that order. Parts of 16 bytes lie by exclusive or with their line's number,
// and no two lanes meet in a bank.
//
// Invariant: the operations on a head are those of `mamba2_scan` behind a chunk, in the same order.

struct Told {
    u64 rows, query_start, seq_lens;
    const int *state_table, *input_table;
    u64 state, x, b, total, dt;
    int num_rows, num_layers, state_next, input_next, state_columns, input_columns, state_first, input_first;
};

#define SIZE 64
#define STATES 128
#define HALF_BYTES (SIZE * STATES * 2)
#define RUNS (HEADS / EACH)
#define THREADS 256
// Places in shared memory: two steps' states, three steps' tokens and gates, B, each warp's weights, two tasks' places.
#define X_AT (2 * 2 * HALF_BYTES)
#define GATES_AT (X_AT + 3 * CHUNK * SIZE * 2)
#define B_AT (GATES_AT + 3 * 512)
#define WEIGHTS_AT (B_AT + CHUNK * STATES * 2)
#define PLACES_AT (WEIGHTS_AT + 8 * 256)
#define PLACES (4 * CHUNK * 8 + 2 * EACH * 8)  // of a task: of x, B, sums and steps of tokens, of old and new states
#define WORDS_AT (PLACES_AT + 2 * PLACES)      // a bit of each row: its token ends a chunk

// Find which rows end a chunk; how many.
__device__ inline int find_rows(const Told& told, u32 base) {
    int words = (told.num_rows + 31) / 32;
    for (int row = thread(); row < words * 32; row += THREADS) {
        bool is_full = false;
        if (row < told.num_rows) {
            int end = (int)read1(told.seq_lens + row * 4);
            is_full = read1(told.query_start + row * 4 + 4) - read1(told.query_start + row * 4) == 1 && end % CHUNK == 0;
        }
        put(base + (row % 32 * 33 + row / 32) * 4, is_full);
    }
    together();
    if ((int)thread() < words) {
        u32 word = 0;
        for (int i = 0; i < 32; ++i) word |= get(base + (i * 33 + thread()) * 4) << i;
        put(base + WORDS_AT + thread() * 4, word);
    }
    together();
    int count = 0;
    for (int i = 0; i < words; ++i) count += count_bits(get(base + WORDS_AT + i * 4));
    return count;
}

// Where a task's things lie. The threads find all.
__device__ inline void find_places(const Told& told, int task, int count, u32 base, u32 places) {
    constexpr Form states{STATE_FORM}, xs{X_FORM}, bs{B_FORM}, totals{TOTAL_FORM}, dts{DT_FORM};
    int layer = task / (count * RUNS), rank = task / RUNS % count, first = task % RUNS * EACH, word = 0;
    u32 bits = get(base + WORDS_AT);
    for (int here = count_bits(bits); here <= rank; here = count_bits(bits)) rank -= here, bits = get(base + WORDS_AT + ++word * 4);
    for (; rank; --rank) bits &= bits - 1;
    int row = word * 32 + count_bits((bits & (0 - bits)) - 1);
    int end = (int)read1(told.seq_lens + row * 4), table_row = (int)read1(told.rows + row * 8), held;
    const int* table = told.input_table + (i64)table_row * told.input_columns;
    int at = thread() % CHUNK, position = end - CHUNK + at, entry = position / BLOCK, offset = position % BLOCK;
    int part = told.input_first + layer * told.input_next;
    u64 found;
    if (thread() < CHUNK) found = told.x + place(table, part, entry, offset, first, SIZE, xs, held) * 2;
    else if (thread() < 2 * CHUNK) found = told.b + place(table, part, entry, offset, first / PER, STATES, bs, held) * 2;
    else if (thread() < 3 * CHUNK) found = told.total + place(table, part, entry, offset, first, 1, totals, held) * 4;
    else found = told.dt + place(table, part, entry, offset, first, 1, dts, held) * 4;
    put_address(places + thread() * 8, found);
    if (thread() < 2 * EACH) {
        int is_new = thread() / EACH, head = first + thread() % EACH, border = end / CHUNK - 2 + is_new;
        const int* kept = told.state_table + (i64)table_row * told.state_columns;
        int own = told.state_first + layer * told.state_next;
        i64 where = place(kept, own, max(border, 0), 0, head * STATES, SIZE, states, held);
        put_address(places + 4 * CHUNK * 8 + thread() * 8, held > 0 && border >= 0 ? told.state + where * 4 : 0);
    }
}

// Ask for a step's tokens: of x, their gates, and with a task's first step B.
__device__ inline void ask_tokens(u32 base, u32 places, int head, int slot) {
    u32 warp = thread() / 32, lane = thread() % 32, part = lane % 4 + lane / 16 * 4;
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        u32 token = warp * 8 + i, to = base + X_AT + slot * (CHUNK * SIZE * 2) + token * 128 + (part ^ i) * 16 + lane / 4 % 4 * 4;
        copy4(to, address_at(places + token * 8) + head * (SIZE * 2) + lane * 4, 4);
    }
    if (thread() < 2 * CHUNK)
        copy4(base + GATES_AT + slot * 512 + thread() * 4, address_at(places + 2 * CHUNK * 8 + thread() * 8) + head * 4, 4);
    if (head) return;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        u32 token = i * 16 + thread() / 16, part = thread() % 16;
        copy16(base + B_AT + token * 256 + (part ^ token % 8) * 16, address_at(places + CHUNK * 8 + token * 8) + part * 16, 16);
    }
}

// Ask for a warp's part of a step's old state, zeros if there is none.
__device__ inline void ask_state(const Told& told, u32 own, u32 places, int head) {
    u32 warp = thread() / 32, lane = thread() % 32;
    u64 old = address_at(places + 4 * CHUNK * 8 + head * 8), from = old ? old + warp * 2048 + lane * 16 : told.state;
    u32 bytes = old ? 16 : 0, to = own + lane / 8 * 128 + (lane % 8 ^ lane / 8 % 2 * 4) * 16;
#pragma unroll
    for (u32 i = 0; i < 8; ++i) copy16(to + i * 512, from + (old ? i % 4 * 512 + i / 4 * HALF_BYTES : 0), bytes);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) mamba2_advance(const __grid_constant__ Told told) {
    let_next_begin();
    extern __shared__ __align__(128) unsigned char memory[];
    u32 base = (u32)__cvta_generic_to_shared(memory), warp = thread() / 32, lane = thread() % 32;
    int count = find_rows(told, base), tasks = count * RUNS * told.num_layers, task = block();
    wait_for_before();
    if (task >= tasks) return;
    find_places(told, task, count, base, base + PLACES_AT);
    together();
    for (int head = 0; head < 2; ++head) {
        ask_tokens(base, base + PLACES_AT, head, head);
        ask_state(told, base + head * (2 * HALF_BYTES) + warp * 4096, base + PLACES_AT, head);
        commit();
    }
    Four b[4];
    u32 weights = base + WEIGHTS_AT + warp * 256;
    int slot = 0;
    for (u32 turn = 0; task < tasks; task += blocks(), turn ^= 1) {
        u32 places = base + PLACES_AT + turn * PLACES, after = base + PLACES_AT + (turn ^ 1) * PLACES;
#pragma unroll 1
        for (int head = 0; head < EACH; ++head) {
            arrived<1>();
            together();
            if (head == 0) {
#pragma unroll
                for (u32 k = 0; k < 4; ++k) {
                    u32 token = k * 16 + lane / 16 * 8 + lane % 8;
                    b[k] = square_turned(base + B_AT + token * 256 + (warp * 2 + lane / 8 % 2 ^ lane % 8) * 16);
                }
            }
            u32 gates = base + GATES_AT + slot * 512, xs = base + X_AT + slot * (CHUNK * SIZE * 2);
            u32 own = base + head % 2 * (2 * HALF_BYTES) + warp * 4096;
            float last = number(get(gates + (CHUNK - 1) * 4)), decay = exponential(last);
#pragma unroll
            for (u32 i = 0; i < 2; ++i) {
                u32 at = (lane + i * 32) * 4;
                put(weights + at, bits_of(times(exponential(less(last, number(get(gates + at)))), number(get(gates + 256 + at)))));
            }
            float state[8][4];
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {  // of rows lane / 4 and 8 on, of either 32 channels
                u32 at = own + (lane / 4 + i % 2 * 8) * 128 + ((lane % 4 + i / 2 * 4) ^ lane / 4 % 2 * 4) * 16;
                Four upper = get4(at), left = get4(at + 2048);
#pragma unroll
                for (u32 j = 0; j < 4; ++j) {
                    state[i / 2 * 4 + j][i % 2 * 2] = times(decay, number((upper.x[j] << 16) + (u32)((int)(left.x[j] << 16) >> 16)));
                    state[i / 2 * 4 + j][i % 2 * 2 + 1] = times(decay, number((upper.x[j] & 0xffff0000u) + (u32)((int)left.x[j] >> 16)));
                }
            }
            warp_together();
            {  // two steps ahead
                bool is_own = head + 2 < EACH;
                if (is_own || task + (int)blocks() < tasks) {
                    u32 of = is_own ? places : after;
                    int next = is_own ? head + 2 : head + 2 - EACH;
                    ask_tokens(base, of, next, slot ? slot - 1 : 2);
                    ask_state(told, own, of, next);
                }
                commit();
            }
#pragma unroll
            for (u32 k = 0; k < 4; ++k) {
                Two low = get2(weights + (k * 16 + lane % 4 * 2) * 4), high = get2(weights + (k * 16 + 8 + lane % 4 * 2) * 4);
                Four weighted;
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    const Two& by = i / 2 ? high : low;
                    weighted.x[i] = pack(times(widened(b[k].x[i] & 0xffff), number(by.x[0])), times(widened(b[k].x[i] >> 16), number(by.x[1])));
                }
#pragma unroll
                for (u32 j = 0; j < 8; j += 2) {
                    u32 token = k * 16 + lane / 8 % 2 * 8 + lane % 8;
                    Four x = square_turned(xs + token * 128 + ((j + lane / 16) ^ lane % 8) * 16);
                    multiply(state[j], weighted, Two{{x.x[0], x.x[1]}});
                    multiply(state[j + 1], weighted, Two{{x.x[2], x.x[3]}});
                }
            }
            if (u64 goal = address_at(places + 4 * CHUNK * 8 + (EACH + head) * 8)) {
                goal += warp * 2048 + lane / 4 * 128 + lane % 4 * 16;
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    Four upper, left;
#pragma unroll
                    for (u32 j = 0; j < 4; ++j) {
                        u32 one = (u32)min((int)bits_of(state[i / 2 * 4 + j][i % 2 * 2]), 0x7fff7fff);
                        u32 two = (u32)min((int)bits_of(state[i / 2 * 4 + j][i % 2 * 2 + 1]), 0x7fff7fff);
                        upper.x[j] = bytes_of(one + 0x8000, two + 0x8000, 0x7632), left.x[j] = bytes_of(one, two, 0x5410);
                    }
                    u64 at = goal + i % 2 * 1024 + i / 2 * 64;
                    write(at, upper);
                    write(at + HALF_BYTES, left);
                }
            }
            if (head == 0 && task + (int)blocks() < tasks) find_places(told, task + blocks(), count, base, after);
            slot = slot == 2 ? 0 : slot + 1;
        }
    }
    arrived<0>();
}
