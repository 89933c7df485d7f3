// A short convolution where many rows decode a token each. Told of and launched by conv_decode.py.
//
// A block has TILE channels, whose weights stay in registers, and its share of the rows. Its threads first find where all
// that these rows keep lies; then each brings four channels of what AHEAD rows kept at once.
//
// Invariant: the operations on a channel are those of `conv_decode_gpu`, in the same order.

struct Told {
    u64 x, weight, bias, out, rows, query_start, seq_lens;
    const int *state_table, *input_table;
    u64 state, input;
    i64 x_row;
    int num_rows, state_columns, input_columns, state_first, input_first;
};

#define THREADS 256
#define TILE (THREADS * 4)
#define OLD (WIDTH - 1)  // tokens that a token sees beside itself
// Of a row in shared memory, addresses: of what each old token brought, where the own one is kept, and where the state
// of OLD tokens; 0: there is none. Then the token, -1 if none is to be decoded.
#define ROW (8 * (2 * OLD + 2))

// Where what is kept of the row's tokens begins. part: 0 to OLD - 1 of old tokens, OLD the own one, behind it the state's.
__device__ inline void find(const Told& told, int row, int part, u32 at) {
    constexpr Form states{STATE_FORM}, inputs{INPUT_FORM};
    int token = (int)read1(told.query_start + row * 4), last = (int)read1(told.seq_lens + row * 4) - 1, held = 0;
    bool is_own = (int)read1(told.query_start + row * 4 + 4) > token && last >= 0;
    u64 found = 0;
    if (is_own) {
        int table_row = (int)read1(told.rows + (i64)row * 8), border = last / CHUNK * CHUNK, position = last - OLD + part;
        const int *kept = told.state_table + (i64)table_row * told.state_columns, *brought = told.input_table + (i64)table_row * told.input_columns;
        if (part <= OLD && position >= border) {
            i64 where = place(brought, told.input_first, position / BLOCK, position % BLOCK, 0, CHANNELS, inputs, held);
            if (held > 0 || part < OLD) found = told.input + where * 2;
        } else if (part < OLD && border > 0) {
            i64 where = place(kept, told.state_first, border / CHUNK - 1, 0, position - border + OLD, CHANNELS, states, held);
            found = told.state + where * 2;
        } else if (part > OLD && (last + 1) % CHUNK == 0) {
            i64 where = place(kept, told.state_first, (last + 1) / CHUNK - 1, 0, part - OLD - 1, CHANNELS, states, held);
            if (held > 0) found = told.state + where * 2;
        }
    }
    put_address(at + part * 8, found);
    if (part == 0) put(at + (2 * OLD + 1) * 8, is_own ? token : -1);
}

// Four numbers, as sums with zero: none is -0.
__device__ inline void widen(const Two& given, float (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = plus(0.0f, widened(i % 2 ? given.x[i / 2] >> 16 : given.x[i / 2] & 0xffff));
}
__device__ inline Two packed(const float (&x)[4]) { return Two{{pack(x[0], x[1]), pack(x[2], x[3])}}; }
__device__ inline Two read_if(u64 at, u32 offset) { return at ? read2(at + offset) : Two{{0, 0}}; }

extern "C" __global__ void __launch_bounds__(THREADS) conv_decode(const __grid_constant__ Told told) {
    let_next_begin();
    extern __shared__ __align__(16) unsigned char memory[];
    u32 base = (u32)__cvta_generic_to_shared(memory), tiles = (CHANNELS + TILE - 1) / TILE, parts = blocks() / tiles;
    int tile = block() % tiles, part = block() / tiles, channel = tile * TILE + thread() * 4;
    int first = (i64)told.num_rows * part / parts, count = (int)((i64)told.num_rows * (part + 1) / parts) - first;
    for (int i = thread(); i < count * (2 * OLD + 1); i += THREADS)
        find(told, first + i / (2 * OLD + 1), i % (2 * OLD + 1), base + i / (2 * OLD + 1) * ROW);
    bool is_there = channel < CHANNELS;
    float weights[WIDTH][4], biases[4] = {};
#pragma unroll
    for (int i = 0; i < (WIDTH + 1) * 4; ++i) {
        u64 from = i / 4 < WIDTH ? told.weight + ((i64)(i / 4) * CHANNELS + channel + i % 4) * 4 : told.bias + (channel + i % 4) * 4;
        float x = is_there && (i / 4 < WIDTH || HAS_BIAS) ? number(read1(from)) : 0.0f;
        if (i / 4 < WIDTH) weights[i / 4][i % 4] = x;
        else biases[i % 4] = plus(0.0f, x);
    }
    together();
    if (!is_there) count = 0;
    for (int begin = 0; begin < count; begin += AHEAD) {
        Two old[AHEAD][OLD], fresh[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
#pragma unroll
            for (int j = 0; j < OLD; ++j)
                old[i][j] = read_if(begin + i < count ? address_at(base + (begin + i) * ROW + j * 8) : 0, channel * 2);
        if (begin == 0) wait_for_before();
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            int token = begin + i < count ? (int)get(base + (begin + i) * ROW + (2 * OLD + 1) * 8) : -1;
            fresh[i] = read_if(token >= 0 ? told.x + token * told.x_row * 2 : 0, channel * 2);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            u32 at = base + (begin + i) * ROW;
            int token = begin + i < count ? (int)get(at + (2 * OLD + 1) * 8) : -1;
            if (token < 0) continue;
            float sum[4] = {biases[0], biases[1], biases[2], biases[3]}, x[4];
            Two seen[WIDTH];
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) {
                widen(j < OLD ? old[i][j < OLD ? j : 0] : fresh[i], x);
                seen[j] = packed(x);
#pragma unroll
                for (int k = 0; k < 4; ++k) sum[k] = plus(sum[k], times(x[k], weights[j][k]));
            }
            u64 goal = address_at(at + OLD * 8);
            if (goal) write2(goal + channel * 2, seen[OLD]);
#pragma unroll
            for (int j = 0; j < OLD; ++j) {  // at a border, the inputs that the next token sees are the state
                u64 border = address_at(at + (OLD + 1 + j) * 8);
                if (border) write2(border + channel * 2, seen[j + 1]);
            }
            if (SILU)
#pragma unroll
                for (int k = 0; k < 4; ++k) sum[k] = over(sum[k], plus(1.0f, exponential(less(0.0f, sum[k]))));
            write2(told.out + ((i64)token * CHANNELS + channel) * 2, packed(sum));
        }
    }
}
