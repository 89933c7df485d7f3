// The gated delta rule over prompts: chunks walked one behind the other. Told of by delta_prompts.py.
//
// A block has a row and 64 * GROUPS channels of a head; a warp 16 of them, whose state it holds in registers, transposed:
// [channels, keys]. A lane has two neighbouring channels. So are all products: what one gives, as the matrix unit lays
// it, is what the next takes for its first operand. From k S to T's, M's, f's and the next state's no lane waits for
// another's numbers. Second operands are a chunk's keys, queries, M, f and T in shared memory. Products of all 64 tokens
// are a warp group's, which reads an operand once for its four warps; those of M and T, between which a block of 16
// tokens waits for the one before it, are a warp's. Four warps more help: while a chunk is computed they write the
// results of the one before it, ask for one that comes, and weigh the keys of the next.
//
// A step may begin within a chunk, which then has the tokens before as they are kept, and the updates of whole blocks of
// 16 before.
//
// Invariant: the operations on a channel are those of `delta_walk` and `delta_scan`, in the same order; where those
// multiply by zeros, they may be left out.

#define LANES 128  // of a group, or that help
#define THREADS (LANES * GROUPS + LANES)
#define CHANNELS (64 * GROUPS)
#define BUFFERS (4 - GROUPS)      // chunks whose operands there is room for
#define PARTS (SIZE / CHANNELS)   // blocks of a head

struct Told {
    Map states;
    const u16 *query, *key, *value;  // normed, [T, KEY_HEADS, SIZE]; value within rows of qkv
    const float *total, *rate;       // [T, HEADS]
    const u16 *before, *factor;      // of `delta_chunks`
    const float* inverse;
    u16* out;
    const i64* rows;
    const int *query_start, *seq_lens, *num_ahead, *state_table, *input_table;
    float* state;
    u16 *key_kept, *value_kept, *update_kept;
    const float *total_kept, *rate_kept;
    i64 value_row;
    int state_columns, input_columns, state_first, input_first, num_rows;
};

// In shared memory: chunks' operands, then weighted keys of two chunks. Keys and queries are two tiles of 64 channels, f
// is one: see `in_tile`. Results take the place of values.
#define TILE (CHUNK * 128)
#define QUERIES (2 * TILE)
#define OWN_F (4 * TILE)
#define OWN_VALUES (5 * TILE)
#define PITCH (2 * CHANNELS + 16)  // of values and results
#define OWN_M (OWN_VALUES + CHUNK * PITCH)
#define M_PITCH 112
#define OWN_T (OWN_M + CHUNK * M_PITCH)
#define T_PITCH 96
#define OWN_SUMS (OWN_T + CHUNK * T_PITCH)
#define OWN_RATES (OWN_SUMS + CHUNK * 4)
#define CHUNK_BYTES ((OWN_RATES + CHUNK * 4 + 1023) / 1024 * 1024)
#define WEIGHTED (BUFFERS * CHUNK_BYTES)

// Whether states leave by the copy engine, from where the chunk's keys and queries were, once no product reads them: two
// tiles of 32 channels each of 64 keys, then of 64 more. With two groups a state's stores go by themselves as fast.
__device__ constexpr bool is_sent_whole(Form form) { return GROUPS == 1 && !(form.block % SIZE || form.part % SIZE || form.line % SIZE); }
#define SENDS (is_sent_whole(Form{STATE_FORM}))
#define OF_GROUP 3, LANES * GROUPS           // a barrier, and how many meet there
#define TELL_STAGED 2, LANES * GROUPS + 32

#define LINES (LANES / 8)  // of which those that help have 16 bytes each
__device__ inline u32 own_lane() { return thread() % LANES; }

// A row's walk.
struct Walk {
    int token, end, computed, begin, first_block, head, key_head, channel;  // first_block: of position 0
    const int *states, *inputs;
};

// Ask for a chunk's operands. Of tokens that are not there zeros come. A thread has one part of 16 bytes of every LINES-th
// line, so that its addresses differ by constants.
__device__ inline void ask(const Told& told, const Walk& walk, int begin, u32 to) {
    int left = walk.end - begin, line = own_lane() / 8, part = thread() % 8;
    i64 token = walk.token + begin - walk.computed + line;
    i64 block = walk.first_block + (begin + line) / 16;
    u64 key = (u64)(told.key + (token * KEY_HEADS + walk.key_head) * SIZE + part * 8);
    u64 query = key - (u64)told.key + (u64)told.query, own_line = (block * HEADS + walk.head) * 16 + line % 16;
    u64 before = (u64)(told.before + own_line * CHUNK + part * 8), factor = before - (u64)told.before + (u64)told.factor;
    u64 inverse = (u64)(told.inverse + own_line * 16 + part * 4);
    u64 value = (u64)(told.value + token * told.value_row + walk.channel + part * 8);
    u32 tile = to + in_tile(line, part);
#pragma unroll
    for (int step = 0; step < CHUNK; step += LINES) {
        int bytes = line + step < left ? 16 : 0, block_line = line / 16 + step / 16;
        bool is_made = block_line * 16 < left;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            copy16(tile + half * TILE + step * 128, key + (step * KEY_HEADS * SIZE + half * 64) * 2, bytes);
            copy16(tile + QUERIES + half * TILE + step * 128, query + (step * KEY_HEADS * SIZE + half * 64) * 2, bytes);
        }
#pragma unroll
        for (int half = 0; half < GROUPS; ++half)
            copy16(to + OWN_VALUES + (line + step) * PITCH + part * 16 + half * 128, value + (step * told.value_row + half * 64) * 2, bytes);
        copy16(tile + OWN_F + step * 128, factor + step * HEADS * CHUNK * 2, is_made && part / 2 <= block_line ? 16 : 0);
        if (part / 2 < block_line)
            copy16(to + OWN_M + (line + step) * M_PITCH + part * 16, before + step * HEADS * CHUNK * 2, is_made ? 16 : 0);
        if (part < 4) copy16(to + OWN_T + (line + step) * T_PITCH + part * 16, inverse + step * HEADS * 16 * 4, is_made ? 16 : 0);
    }
    u32 mine = own_lane();
    if (mine < 2 * CHUNK) {
        int at = mine % CHUNK;
        const float* from = mine < CHUNK ? told.total : told.rate;
        copy4(to + OWN_SUMS + mine * 4, (u64)(from + (token - line + at) * HEADS + walk.head), at < left ? 4 : 0);
    }
    commit();
}

// The same of a chunk that the step begins within. Values of whole blocks before are their updates.
__device__ inline void ask_open(const Told& told, const Walk& walk, u32 to) {
    constexpr Form keys{KEY_FORM}, values{VALUE_FORM}, updates{UPDATE_FORM}, totals{TOTAL_FORM}, rates{RATE_FORM};
    u32 part = thread() % 8;
    int held, known = walk.computed / 16 * 16;
#pragma unroll 1
    for (u32 line = own_lane() / 8; line < CHUNK; line += LINES) {
        int at = walk.begin + line, bytes = at < walk.end ? 16 : 0, sum_bytes = bytes / 4;
        bool is_old = at < walk.computed, is_made = at >= known && at / 16 * 16 < walk.end;
        i64 token = (i64)walk.token + at - walk.computed, own_line = ((i64)(walk.first_block + at / 16) * HEADS + walk.head) * 16 + at % 16;
        const u16 *key = told.key + (token * KEY_HEADS + walk.key_head) * SIZE, *query = told.query + (key - told.key);
        const u16* value = told.value + token * told.value_row;
        const float *total = told.total + token * HEADS, *rate = told.rate + token * HEADS;
        if (is_old) {
            key = told.key_kept + place(walk.inputs, told.input_first, at / BLOCK, at % BLOCK, 0, SIZE, keys, held) + walk.key_head * SIZE;
            u64 where = at < known ? place(walk.inputs, told.input_first, at / BLOCK, at % BLOCK, 0, SIZE, updates, held)
                                   : place(walk.inputs, told.input_first, at / BLOCK, at % BLOCK, 0, SIZE, values, held);
            value = (at < known ? told.update_kept : told.value_kept) + where;
            total = told.total_kept + place(walk.inputs, told.input_first, at / BLOCK, at % BLOCK, 0, SIZE, totals, held);
            rate = told.rate_kept + place(walk.inputs, told.input_first, at / BLOCK, at % BLOCK, 0, SIZE, rates, held);
        }
        for (int half = 0; half < 2; ++half) {
            u32 tile = to + half * TILE + in_tile(line, part);
            copy16(tile, (u64)(key + half * 64 + part * 8), bytes);
            copy16(tile + QUERIES, (u64)(query + half * 64 + part * 8), is_old ? 0 : bytes);
        }
        for (int half = 0; half < GROUPS; ++half)
            copy16(to + OWN_VALUES + line * PITCH + part * 16 + half * 128, (u64)(value + walk.channel + half * 64 + part * 8), bytes);
        copy16(to + OWN_F + in_tile(line, part), (u64)(told.factor + own_line * CHUNK + part * 8), is_made && part / 2 <= line / 16 ? 16 : 0);
        if (part / 2 < line / 16)
            copy16(to + OWN_M + line * M_PITCH + part * 16, (u64)(told.before + own_line * CHUNK + part * 8), is_made ? 16 : 0);
        if (part < 4)
            copy16(to + OWN_T + line * T_PITCH + part * 16, (u64)(told.inverse + own_line * 16 + part * 4), is_made ? 16 : 0);
        if (part < 2)
            copy4(to + (part ? OWN_RATES : OWN_SUMS) + line * 4, (u64)((part ? rate : total) + walk.head), sum_bytes);
    }
    commit();
}

// The inputs of tokens from `from` on that are to be kept, four parts of 16 bytes a lane at a time, a turn: they are asked
// for, and written later.
struct Kept {
    Four given[4];
    u64 goal[4];
};
__device__ inline int num_keys(const Walk& walk) { return walk.channel % (HEADS / KEY_HEADS * SIZE) ? 0 : SIZE / 8; }  // parts of a token
__device__ inline int num_turns(const Walk& walk, int from) {
    return ((walk.end - from) * (CHANNELS / 8 + num_keys(walk)) + 4 * LANES - 1) / (4 * LANES);
}
__device__ inline void ask_kept(const Told& told, const Walk& walk, int from, int turn, Kept& kept) {
    constexpr Form keys{KEY_FORM}, values{VALUE_FORM};
    int num_values = (walk.end - from) * (CHANNELS / 8), num = num_values + (walk.end - from) * num_keys(walk), held;
    u64 source[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int asked = turn * 4 * LANES + i * LANES + own_lane(), part = min(asked, num - 1);
        bool is_key = part >= num_values;
        if (is_key) part -= num_values;
        int wide = is_key ? SIZE / 8 : CHANNELS / 8, at = from + part / wide, inner = part % wide * 8;
        i64 token = (i64)walk.token + at - walk.computed;
        u64 where = is_key ? place(walk.inputs, told.input_first, at / BLOCK, at % BLOCK, 0, SIZE, keys, held)
                           : place(walk.inputs, told.input_first, at / BLOCK, at % BLOCK, 0, SIZE, values, held);
        inner += is_key ? walk.key_head * SIZE : walk.channel;
        source[i] = (u64)(is_key ? told.key + token * KEY_HEADS * SIZE + inner : told.value + token * told.value_row + inner);
        kept.goal[i] = held > 0 && asked < num ? (u64)((is_key ? told.key_kept : told.value_kept) + where + inner) : 0;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) kept.given[i] = read(source[i]);
}
__device__ inline void write_kept(const Kept& kept) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (kept.goal[i]) write(kept.goal[i], kept.given[i]);
}

// Of two words the low halves, or the high ones.
__device__ inline u32 lows(u32 first, u32 second) { return bytes_of(first, second, 0x5410); }
__device__ inline u32 highs(u32 first, u32 second) { return bytes_of(first, second, 0x7632); }

// 8 tokens' 16 channels, as products give them, transposed: of a token, which is lane / 4, four channels to write.
__device__ inline Two written(u32 even, u32 odd) {
    even = transposed(even), odd = transposed(odd);
    return Two{{lows(even, odd), highs(even, odd)}};
}

// Weigh a chunk's keys by what is left of them at its end.
__device__ inline void weigh(u32 own, u32 to, int last) {
    u32 line = own_lane() / 8, at = in_tile(line, own_lane() % 8);
    float sum = number(get(own + OWN_SUMS + last * 4)), weight[CHUNK / LINES];
    Four key[2 * CHUNK / LINES];
#pragma unroll
    for (int i = 0; i < 2 * CHUNK / LINES; ++i) key[i] = get4(own + at + i % 2 * TILE + i / 2 * LINES * 128);
#pragma unroll
    for (int i = 0; i < CHUNK / LINES; ++i) weight[i] = number(get(own + OWN_SUMS + (line + i * LINES) * 4));
#pragma unroll
    for (int i = 0; i < CHUNK / LINES; ++i) weight[i] = exponential(less(sum, weight[i]));
#pragma unroll
    for (int i = 0; i < 2 * CHUNK / LINES; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            u32 pair = key[i].x[j];
            key[i].x[j] = pack(times(widened(pair & 0xffff), weight[i / 2]), times(widened(pair >> 16), weight[i / 2]));
        }
        put4(to + at + i % 2 * TILE + i / 2 * LINES * 128, key[i]);
    }
}

// Write the results of the chunk at `begin`, which lie where its values were.
__device__ inline void write_results(const Told& told, const Walk& walk, int begin, u32 own) {
    int line = own_lane() / 8, part = own_lane() % 8;
    i64 token = walk.token + begin - walk.computed + line;
    u64 goal = (u64)(told.out + token * HEADS * SIZE + walk.channel + part * 8);
    constexpr int count = CHUNK / LINES * GROUPS;
    Four given[count];
#pragma unroll
    for (int i = 0; i < count; ++i)
        given[i] = get4(own + OWN_VALUES + (line + i / GROUPS * LINES) * PITCH + part * 16 + i % GROUPS * 128);
#pragma unroll
    for (int i = 0; i < count; ++i) {
        int at = begin + line + i / GROUPS * LINES;
        if (at < walk.end && at >= walk.computed) write(goal + (i / GROUPS * LINES * HEADS * SIZE + i % GROUPS * 64) * 2, given[i]);
    }
}

// Where the head's state behind `border` tokens is kept; -1: it is not.
__device__ inline i64 state_at(const Told& told, const Walk& walk, int border) {
    constexpr Form states{STATE_FORM};
    int held;
    u64 goal = place(walk.states, told.state_first, border / CHUNK - 1, 0, walk.head * SIZE, SIZE, states, held);
    return held > 0 ? (i64)goal : -1;
}

// Of eight keys, what the lane has of a state. goal: of its first key and channel.
__device__ inline void write_keys(float* goal, int eight, const float (&state)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
        write2((u64)(goal + (eight * 8 + i) * SIZE), Two{{bits_of(state[i]), bits_of(state[2 + i])}});
}

// The same, as the copy engine takes it. own: where the chunk lies.
__device__ inline void stage(u32 own, int eight, const float (&state)[4], u32 warp, u32 lane) {
    u32 to = own + (eight / 8 * 2 + warp / 2) * TILE + eight % 8 * 1024 + lane / 4 % 2 * 8;
#pragma unroll
    for (int i = 0; i < 2; ++i)
        put2(to + in_tile(lane % 4 * 2 + i, warp % 2 * 4 + lane / 8), Two{{bits_of(state[i]), bits_of(state[2 + i])}});
}

// A warp's: send a state that all have staged.
__device__ inline void send_state(const Told& told, const Walk& walk, u32 own, i64 goal) {
    some_together(TELL_STAGED);
    if (own_lane() == 0)
#pragma unroll
        for (int box = 0; box < 4; ++box)
            send_box(told.states, (u64)told.state, walk.channel % SIZE + box % 2 * 32, (int)(goal / SIZE) + box / 2 * 64, own + box * TILE);
    commit_sent();
}

// What the four warps do that help. With room for three chunks they ask for one two ahead, else for the next.
__device__ inline void help(const Told& told, const Walk& walk, u32 base, int kept_from) {
    wait_for_before();
    if (walk.begin < walk.computed) ask_open(told, walk, base);
    else ask(told, walk, walk.begin, base);
    int end = walk.end, begin = walk.begin, turn = 0, keeping = 0, num_keeping = GROUPS == 2 ? num_turns(walk, kept_from) : 0;
    u32 own = base, next = base + CHUNK_BYTES, before = base + (BUFFERS - 1) * CHUNK_BYTES;
    Kept kept;
    auto ask_for = [&](int begin, u32 to) {
        if (begin < end) ask(told, walk, begin, to);
        else commit();
    };
    auto make_ready = [&](int begin, u32 at, int turn) {
        arrived<BUFFERS - 2>();
        some_together(1, LANES);
        weigh(at, base + WEIGHTED + turn * 2 * TILE, min(end - begin, CHUNK) - 1);
        seen_by_groups();
    };
    if (BUFFERS > 2) ask_for(begin + CHUNK, next);
    make_ready(begin, own, turn);
    i64 goal = -1;
    bool is_sending = false;  // from `before`
#pragma unroll 1
    for (; begin < end; begin += CHUNK) {
        bool keeps = keeping < num_keeping;
        if (keeps) ask_kept(told, walk, kept_from, keeping++, kept);
        if (SENDS && begin > walk.begin) goal = state_at(told, walk, begin);
        together();
        if (begin > walk.begin) write_results(told, walk, begin - CHUNK, before);
        if (is_sending) {
            if (own_lane() < 32) was_read<0>();
            some_together(1, LANES);
        }
        ask_for(begin + (BUFFERS - 1) * CHUNK, before);
        turn ^= 1;
        if (begin + CHUNK < end) make_ready(begin + CHUNK, next, turn);
        is_sending = goal >= 0;
        if (is_sending && own_lane() < 32) send_state(told, walk, own, goal);
        if (keeps) write_kept(kept);
        u32 free = before;
        before = own, own = next, next = BUFFERS > 2 ? free : before;
    }
    if (SENDS) goal = end % CHUNK ? -1 : state_at(told, walk, end);
    together();
    write_results(told, walk, begin - CHUNK, before);
    if (goal >= 0 && own_lane() < 32) send_state(told, walk, own, goal);
    if (SENDS) was_read<0>();
    for (; keeping < num_keeping; ++keeping) ask_kept(told, walk, kept_from, keeping, kept), write_kept(kept);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) delta_prompts(const __grid_constant__ Told told) {
    constexpr Form updates{UPDATE_FORM};
    extern __shared__ __align__(1024) unsigned char memory[];
    u32 base = (u32)__cvta_generic_to_shared(memory), lane = thread() % 32;
    u32 warp = from_lane(thread() / 32, 0);  // one for the warp: so are addresses of products, which the compiler then sees
    int row = *told.num_ahead + block() / (HEADS * PARTS);
    bool is_row = row < told.num_rows;
    if (!is_row) row = 0;
    Walk walk;
    walk.token = told.query_start[row], walk.end = told.seq_lens[row];
    walk.computed = walk.end - (told.query_start[row + 1] - walk.token);
    if (!is_row || walk.computed >= walk.end || walk.computed < 0) {  // nothing, or padding
        wait_for_before();  // or the kernel behind would begin before what is ahead has ended
        return;
    }
    walk.channel = block() % (HEADS * PARTS) * CHANNELS;
    walk.head = walk.channel / SIZE, walk.key_head = walk.head / (HEADS / KEY_HEADS);
    walk.begin = walk.computed / CHUNK * CHUNK;
    walk.first_block = walk.token / 16 + 2 * row - walk.computed / 16;
    walk.states = told.state_table + told.rows[row] * told.state_columns;
    walk.inputs = told.input_table + told.rows[row] * told.input_columns;
    int kept_from = max(walk.computed, (walk.end - 1) / CHUNK * CHUNK - CHUNK), held;
    if (warp >= 4 * GROUPS) {
        if (GROUPS == 2) give_registers<88>();  // of 168
        help(told, walk, base, kept_from);
        return;
    }
    if (GROUPS == 2) take_registers<208>();
    u32 first = walk.channel % SIZE + warp * 16, lane_first = lane % 4 * 2 * SIZE + first + lane / 4 * 2;
    float state[16][4] = {};
    i64 source = walk.begin > 0 ? state_at(told, walk, walk.begin) : -1;
    if (source >= 0)
#pragma unroll
        for (int j = 0; j < 16; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                state[j][i] = told.state[source + lane_first + (j * 8 + i % 2) * SIZE + i / 2];
    wait_for_before();
    Kept given;
    for (int turn = 0; GROUPS == 1 && turn < num_turns(walk, kept_from); ++turn)  // with two, those keep that help
        ask_kept(told, walk, kept_from, turn, given), write_kept(given);
    int begin = walk.begin, turn = 0, half_turn = 0;
#pragma unroll 1
    for (; begin < walk.end; begin += CHUNK) {
        u32 own = base + turn * CHUNK_BYTES, weighted = base + WEIGHTED + half_turn * 2 * TILE;
        int left = walk.end - begin;
        together();  // the chunk is there and weighed, and results of the one before are
        Four rounded[8], update[4];
        float begun[8][2];
#pragma unroll
        for (int step = 0; step < 8; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                rounded[step].x[i] = pack(state[2 * step + i / 2][i % 2 * 2], state[2 * step + i / 2][i % 2 * 2 + 1]);
        float of_key[8][4] = {}, of_query[8][4] = {};
        hold(rounded), hold(of_key), hold(of_query);
        group_begin();
#pragma unroll
        for (int step = 0; step < 8; ++step) group_multiply(of_key, rounded[step], own + step / 4 * TILE + step % 4 * 32);
        group_commit();
#pragma unroll
        for (int step = 0; step < 8; ++step)
            group_multiply(of_query, rounded[step], own + QUERIES + step / 4 * TILE + step % 4 * 32);
        group_commit();
        i64 goal = begin > walk.begin ? state_at(told, walk, begin) : -1;
        float* kept = told.state + goal + lane_first;
        float decay = exponential(number(get(own + OWN_SUMS + (min(left, CHUNK) - 1) * 4)));
        group_arrived<1>(of_key);
#pragma unroll
        for (int block = 0; block < 4; ++block) {
            float of_m[2][4] = {};
#pragma unroll
            for (int other = 0; other < block; ++other) {
                Four m = columns(own + OWN_M + block * 16 * M_PITCH + other * 32, M_PITCH, lane);
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    multiply(of_m[half], update[other], Two{{m.x[2 * half], m.x[2 * half + 1]}});
            }
            Two values[2];  // of 8 tokens: of two of them a word, of both channels
            Four even, odd;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32 token = block * 16 + half * 8 + lane % 4 * 2;
                Two sums = get2(own + OWN_SUMS + token * 4), rates = get2(own + OWN_RATES + token * 4);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    values[half].x[i] = get(own + OWN_VALUES + (token + i) * PITCH + warp * 32 + lane / 4 * 4);
                    begun[2 * block + half][i] = exponential(number(sums.x[i]));
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    u32 word = values[half].x[i % 2];
                    float right = less(widened(i / 2 ? word >> 16 : word & 0xffff), times(begun[2 * block + half][i % 2], of_key[2 * block + half][i]));
                    float rest = less(times(number(rates.x[i % 2]), right), of_m[half][i]);
                    (i % 2 ? odd : even).x[half * 2 + i / 2] = bits_of(rest);
                }
            }
            float found[2][4] = {};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32 at = own + OWN_T + (block * 16 + half * 8 + lane / 4) * T_PITCH + lane % 4 * 8;
                Two first = get2(at), second = get2(at + 32);
                multiply_tf32(found[half], even, Two{{first.x[0], second.x[0]}});
                multiply_tf32(found[half], odd, Two{{first.x[1], second.x[1]}});
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) update[block].x[i] = pack(found[i / 2][i % 2 * 2], found[i / 2][i % 2 * 2 + 1]);
            if (begin + block * 16 + 16 <= walk.computed)  // it is there, as values
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    update[block].x[2 * half] = lows(values[half].x[0], values[half].x[1]);
                    update[block].x[2 * half + 1] = highs(values[half].x[0], values[half].x[1]);
                }
            if (block == (SENDS ? 0 : 1)) group_arrived<0>(of_query);
            if (SENDS && block == 1 && goal >= 0) some_together(OF_GROUP);  // no product reads keys and queries any more
#pragma unroll
            for (int j = block > 1 ? 2 * block : 0; j < (block > 0 ? 2 * block + 2 : 0); ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) of_query[j][i] = times(begun[j][i % 2], of_query[j][i]);
            // The state behind the chunk before: a few keys at a time, so that nothing waits behind them.
#pragma unroll
            for (int j = 0; j < 16; ++j) {
                if (block != (SENDS && j < 4 ? 1 : j / 4)) continue;
                if (goal >= 0) {
                    if (SENDS) stage(own, j, state[j], warp, lane);
                    else write_keys(kept, j, state[j]);
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) state[j][i] = times(decay, state[j][i]);
            }
        }
        hold(update), hold(of_query), hold(state);
        group_begin();
#pragma unroll
        for (int step = 0; step < 4; ++step) group_multiply(of_query, update[step], own + OWN_F + step * 32);
        group_commit();
#pragma unroll
        for (int step = 0; step < 4; ++step) group_multiply_turned(state, update[step], weighted + step * 2048, TILE);
        group_commit();
        if (SENDS && goal >= 0) {
            seen_by_groups();
            tell_some(TELL_STAGED);
        }
        group_arrived<1>(of_query);
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                put(own + OWN_VALUES + (j * 8 + lane % 4 * 2 + i) * PITCH + warp * 32 + lane / 4 * 4, pack(of_query[j][i], of_query[j][2 + i]));
        if (begin + CHUNK > kept_from)
#pragma unroll
            for (int some = 0; some < 8; some += GROUPS * GROUPS) {  // at once
                u64 goals[GROUPS * GROUPS];
#pragma unroll
                for (int j = some; j < some + GROUPS * GROUPS; ++j) {
                    int line = j * 8 + lane / 4, at = begin + min(line, left - 1);
                    u64 where = place(walk.inputs, told.input_first, at / BLOCK, at % BLOCK, 0, SIZE, updates, held);
                    where += walk.head * SIZE + first + lane % 4 * 4;
                    goals[j - some] = held > 0 && line < left && at >= kept_from ? (u64)(told.update_kept + where) : 0;
                }
#pragma unroll
                for (int j = some; j < some + GROUPS * GROUPS; ++j) {
                    Two own_update = written(update[j / 2].x[j % 2 * 2], update[j / 2].x[j % 2 * 2 + 1]);
                    if (goals[j - some]) write2(goals[j - some], own_update);
                }
            }
        group_arrived<0>(state);
        turn = turn == BUFFERS - 1 ? 0 : turn + 1, half_turn ^= 1;
    }
    together();
    i64 goal = walk.end % CHUNK ? -1 : state_at(told, walk, walk.end);
    float* kept = told.state + goal + lane_first;
    if (goal < 0) return;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        if (SENDS) stage(base + turn * CHUNK_BYTES, j, state[j], warp, lane);
        else write_keys(kept, j, state[j]);
    }
    seen_by_groups();
    if (SENDS) tell_some(TELL_STAGED);
}
