// The gated delta rule where rows decode: the stream of states. Told of and launched by delta_stream.py.
//
// A task is a row and a head of its keys, with those of the values that share it: a warp takes 32 channels of one head.
// A warp's states, updates and values come by asynchronous copies into a ring of its own, SLOT bytes a step, ROUND steps
// a task, on past the end of each task to the next. A lane copies what it will read itself, as the matrix unit's second
// operand wants it, into 64 bytes of each step that are its own: nobody waits for another lane or warp but once a task,
// for what all share. Column n of the product
// j of four is channel 4 n + j, so that a lane's numbers lie together.
//
// Invariant: the operations on a head are those of `delta_decode`, in the same order; where that multiplies by zeros,
// they are left out.

// Constants of a tensor that is kept: see `octavo.ops.scan.kept.Form`.
struct Form {
    i64 block, part, line;
    int lines, of_item, runs, parts, blocks;
};
#define CHUNK 64
#define SIZE 128  // of a head's keys, and of its values
#define THREADS (32 * 4 * PER)
#define SLOT 2048
#define ROUND 11  // steps of a task: eight of 16 rows of the state, two of 32 tokens' updates, one of values

struct Told {
    const u16 *query, *key;   // of `delta_ready`, as the next three
    const u16 *before, *factor;
    const float* factors;
    const u16* value;
    u16* out;
    const i64* rows;
    const int *query_start, *seq_lens, *state_table, *input_table;
    const float* state;
    const u16* key_kept;
    u16 *value_kept, *update_kept;
    i64 value_row;
    int state_columns, input_columns, state_first, input_first, num_rows, unused;
};

// In shared memory, of a block: rings, then what its warps share of two tasks, then where three tasks' things lie.
#define KEY_PITCH 272
#define M_PITCH 144
#define OF_HEAD (16 * M_PITCH + 128 + 192)  // M, the factors of o, and exp(G), beta and T's row
#define QUERY (16 * KEY_PITCH)
#define HEADS_AT (QUERY + 256)
#define SHARED_BYTES_OF_TASK (HEADS_AT + PER * OF_HEAD)
#define RINGS (4 * PER * DEPTH * SLOT)
#define PLACES_AT (RINGS + 2 * SHARED_BYTES_OF_TASK)
// Addresses, 0 where nothing is: of 64 tokens' updates, of 16 tokens' values and keys, of states; where the token's
// update, its value and its result go; the token's position.
#define UPDATES 0
#define VALUES 512
#define KEYS 640
#define STATES 768
#define GOALS 800
#define LAST 824
#define PLACES_BYTES 832

struct Row {
    int token, next, end;
    i64 table_row;
};

__device__ inline Row row_of(const Told& told, int task) {
    int row = task / KEY_HEADS;
    if (row >= told.num_rows) return Row{0, 0, 1, 0};
    return Row{told.query_start[row], told.query_start[row + 1], told.seq_lens[row], told.rows[row]};
}

// Where a thread looks in a table, and what it will add to the block's address.
struct Sought {
    const int* entry;  // null: nothing is asked for
    i64 inner;
};

__device__ inline Sought seek(const int* table, int first_part, int entry, int offset, int run, const Form& form) {
    int line = offset * form.of_item + run / form.runs, part = first_part + line / form.lines;
    i64 inner = part % form.parts * form.part + line % form.lines * form.line + run % form.runs * (i64)SIZE;
    return Sought{table + entry * form.blocks + part / form.parts, inner};
}

// What thread i of a block looks for: updates of the chunk (0 to 63), values (64) and keys (80) of the token's block of
// 16, states (96), where update and value go (100, 101); 102 and 103 say the rest.
__device__ inline Sought sought_by(u32 i, const Told& told, const Row& row, int task) {
    constexpr Form states{STATE_FORM}, keys{KEY_FORM}, values{VALUE_FORM}, updates{UPDATE_FORM};
    if (row.next <= row.token || i >= 102) return Sought{nullptr, 0};
    int last = row.end - 1, border = last / CHUNK * CHUNK;
    const int* table = told.input_table + row.table_row * told.input_columns;
    if (i >= 96 && i < 100) {
        if ((int)i - 96 >= PER || border == 0) return Sought{nullptr, 0};
        int head = task % KEY_HEADS * PER + (i - 96);
        const int* own = told.state_table + row.table_row * told.state_columns;
        return seek(own, told.state_first, border / CHUNK - 1, 0, head * SIZE, states);
    }
    int at = i < 64 ? border + i : i < 96 ? last / 16 * 16 + (int)(i % 16) : last;
    if (i < 96 && at >= last) return Sought{nullptr, 0};
    int entry = at / BLOCK, offset = at % BLOCK;
    if (i < 64 || i == 100) return seek(table, told.input_first, entry, offset, 0, updates);
    if (i < 80 || i == 101) return seek(table, told.input_first, entry, offset, 0, values);
    return seek(table, told.input_first, entry, offset, 0, keys);
}

__device__ inline void put_address(u32 at, u64 x) {
    put(at, (u32)x);
    put(at + 4, (u32)(x >> 32));
}

// Write down what thread i found: `held` is what the table said.
__device__ inline void tell(u32 i, u32 places, const Told& told, const Row& row, int task, const Sought& sought, int held) {
    constexpr Form states{STATE_FORM}, keys{KEY_FORM}, values{VALUE_FORM}, updates{UPDATE_FORM};
    bool is_row = row.next > row.token, found = sought.entry != nullptr;
    int last = is_row ? row.end - 1 : 0, at = last / 16 * 16 + (int)(i % 16);
    u64 address = 0;
    if (i < 64) {
        if (found) address = (u64)(told.update_kept + held * updates.block + sought.inner);
        put_address(places + UPDATES + 8 * i, address);
    } else if (i < 80) {
        if (found) address = (u64)(told.value_kept + held * values.block + sought.inner);
        else if (is_row && at == last) address = (u64)(told.value + row.token * told.value_row);
        put_address(places + VALUES + 8 * (i - 64), address);
    } else if (i < 96) {
        if (found) address = (u64)(told.key_kept + held * keys.block + sought.inner + task % KEY_HEADS * SIZE);
        else if (is_row && at == last) address = (u64)(told.key + (i64)task * SIZE);
        put_address(places + KEYS + 8 * (i - 80), address);
    } else if (i < 100) {
        if (found) address = (u64)(told.state + held * states.block + sought.inner);
        put_address(places + STATES + 8 * (i - 96), address);
    } else if (i == 100) {
        if (found && held > 0) address = (u64)(told.update_kept + held * updates.block + sought.inner);
        put_address(places + GOALS, address);
    } else if (i == 101) {
        if (found && held > 0) address = (u64)(told.value_kept + held * values.block + sought.inner);
        put_address(places + GOALS + 8, address);
    } else if (i == 102) {
        if (is_row) address = (u64)(told.out + (i64)row.token * (HEADS * SIZE));
        put_address(places + GOALS + 16, address);
    } else if (i == 103) {
        put(places + LAST, last);
    }
}

__device__ inline u64 address_at(u32 at) {
    Two both = get2(at);
    return both.x[0] | (u64)both.x[1] << 32;
}

// Ask for what all warps share of a task: 16 keys, the query, and of each head what `delta_ready` made.
__device__ inline void share(const Told& told, int task, u32 to, u32 places) {
    constexpr int OF = 128 + 8 + 12, ALL = 256 + 16 + PER * OF;
    if (task >= told.num_rows * KEY_HEADS) return;
    for (int i = thread(); i < ALL; i += THREADS) {
        if (i < 256) {
            u64 from = address_at(places + KEYS + i / 16 * 8);
            copy16(to + i / 16 * KEY_PITCH + i % 16 * 16, from ? from + i % 16 * 16 : (u64)told.key, from ? 16 : 0);
            continue;
        }
        if (i < 272) {
            copy16(to + QUERY + (i - 256) * 16, (u64)(told.query + (i64)task * SIZE) + (i - 256) * 16, 16);
            continue;
        }
        int head = (i - 272) / OF, part = (i - 272) % OF;
        i64 line = (i64)task * PER + head;
        u32 goal = to + HEADS_AT + head * OF_HEAD;
        if (part < 128)
            copy16(goal + part / 8 * M_PITCH + part % 8 * 16, (u64)(told.before + line * 1024) + part * 16, 16);
        else if (part < 136)
            copy16(goal + 16 * M_PITCH + (part - 128) * 16, (u64)(told.factor + line * 64) + (part - 128) * 16, 16);
        else
            copy16(goal + 16 * M_PITCH + 128 + (part - 136) * 16, (u64)(told.factors + line * 48) + (part - 136) * 16, 16);
    }
}

// What a warp asks for of a task.
struct Ahead {
    u64 state;   // of the lane's first row and channels; 0: there is none
    u32 places;  // 0: there is no task
    int blocks;  // of 16 tokens, of the chunk before the token's
};

__device__ inline Ahead ahead_of(const Told& told, int task, u32 places, u32 warp, u32 lane) {
    if (task >= told.num_rows * KEY_HEADS) return Ahead{0, 0, 0};
    u64 state = address_at(places + STATES + warp / 4 * 8);
    if (state) state += lane % 4 * 1024 + warp % 4 * 128 + lane / 4 * 16;
    return Ahead{state, places, (int)get(places + LAST) % CHUNK / 16};
}

// Ask for a step of a task. channels: of the warp's first one, in bytes of 16-bit numbers.
__device__ inline void ask(int step, u32 to, const Told& told, const Ahead& of, u32 channels, u32 lane) {
    u64 nowhere = (u64)told.query;
    if (of.places) {
        if (step < 8) {
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                u64 from = of.state + (step * 16 + r / 2 * 8 + r % 2) * 512;
                copy16(to + r * 512 + lane * 16, of.state ? from : nowhere, of.state ? 16 : 0);
            }
        } else if (step < 10) {
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                int own = (step - 8) * 2 + part;
                if (own <= of.blocks) {
#pragma unroll
                    for (int r = 0; r < 4; ++r) {
                        u32 token = own * 16 + lane % 4 * 2 + r / 2 * 8 + r % 2;
                        u64 from = address_at(of.places + UPDATES + token * 8);
                        copy8(to + (part * 2 + r / 2) * 512 + lane * 16 + r % 2 * 8,
                              from ? from + channels + lane / 4 * 8 : nowhere, from ? 8 : 0);
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

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) delta_stream(const __grid_constant__ Told told) {
    let_next_begin();
    extern __shared__ __align__(128) unsigned char memory[];
    u32 base = (u32)__cvta_generic_to_shared(memory);
    u32 warp = thread() / 32, lane = thread() % 32, ring = base + warp * (DEPTH * SLOT);
    int tasks = told.num_rows * KEY_HEADS, task = block(), by = blocks();
    u32 own_head = warp / 4, square_at = lane % 16 * KEY_PITCH + lane / 16 * 16;
    u32 square_of_m = lane % 16 * M_PITCH + lane / 16 * 16;
    for (int i = 0; i < 2; ++i) {
        Row row = row_of(told, task + i * by);
        Sought sought = sought_by(thread(), told, row, task + i * by);
        tell(thread(), base + PLACES_AT + i * PLACES_BYTES, told, row, task + i * by, sought,
             sought.entry ? *sought.entry : 0);
    }
    together();
    u32 head = task % KEY_HEADS * PER + own_head, channels = (head * SIZE + warp % 4 * 32) * 2;
    Ahead now = ahead_of(told, task, base + PLACES_AT, warp, lane), then;
#pragma unroll
    for (int step = 0; step < DEPTH - 1; ++step) ask(step, ring + step * SLOT, told, now, channels, lane);
    wait_for_before();
    share(told, task, base + RINGS, base + PLACES_AT);
    commit();
    arrived<0>();
    u32 use = 0;  // the ring's place that is read next
    for (int round = 0; task < tasks; ++round, task += by) {
        together();  // what all share of this task is there, and where all of the next lies; nobody reads the last one's
        u32 shared = base + RINGS + round % 2 * SHARED_BYTES_OF_TASK;
        u32 others = base + RINGS + (round + 1) % 2 * SHARED_BYTES_OF_TASK;
        u32 next_places = base + PLACES_AT + (round + 1) % 3 * PLACES_BYTES;
        u32 last_places = base + PLACES_AT + (round + 2) % 3 * PLACES_BYTES;
        u32 next_channels = (((task + by) % KEY_HEADS * PER + own_head) * SIZE + warp % 4 * 32) * 2;
        u32 of_head = shared + HEADS_AT + own_head * OF_HEAD, factors = of_head + 16 * M_PITCH + 128;
        then = ahead_of(told, task + by, next_places, warp, lane);
        Row row;
        Sought sought;
        int held = 0;
        float of_key[4][4] = {}, of_query[4][4] = {};
        u32 slot;
#define NEXT(step)                                                                                              \
    arrived<DEPTH - 2>();                                                                                       \
    slot = ring + use * SLOT;                                                                                   \
    {                                                                                                           \
        u32 free = ring + (use == 0 ? DEPTH - 1 : use - 1) * SLOT;                                              \
        if ((step) + DEPTH - 1 < ROUND) ask((step) + DEPTH - 1, free, told, now, channels, lane);               \
        else ask((step) + DEPTH - 1 - ROUND, free, told, then, next_channels, lane);                            \
    }                                                                                                           \
    use = use == DEPTH - 1 ? 0 : use + 1;
#pragma unroll
        for (int step = 0; step < 8; ++step) {
            if (step == 1) share(told, task + by, others, next_places);  // they count to the step's copies
            NEXT(step)
            if (step == 0) row = row_of(told, task + 2 * by);
            if (step == 2) sought = sought_by(thread(), told, row, task + 2 * by);
            if (step == 2) held = sought.entry ? *sought.entry : 0;
            if (step == 6) tell(thread(), last_places, told, row, task + 2 * by, sought, held);
            Four state[4];
#pragma unroll
            for (int r = 0; r < 4; ++r) state[r] = get4(slot + r * 512 + lane * 16);
            Four key = square(shared + square_at + step * 32), query = equal_rows(shared + QUERY + step * 32, lane);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                Two rounded{{pack(number(state[0].x[j]), number(state[1].x[j])),
                             pack(number(state[2].x[j]), number(state[3].x[j]))}};
                multiply(of_query[j], query, rounded);
                multiply(of_key[j], key, rounded);
            }
        }
        int last = get(now.places + LAST) % CHUNK, here = last % 16;
        float own_begun = number(get(factors + here * 4));
        float of_m[4][4] = {};
        Two held_updates[4] = {};
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) of_query[j][i] = times(own_begun, of_query[j][i]);
#pragma unroll
        for (int step = 8; step < 10; ++step) {
            NEXT(step)
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                int own = (step - 8) * 2 + part;
                if (own <= now.blocks) {
                    Four words[2] = {get4(slot + part * 1024 + lane * 16), get4(slot + part * 1024 + 512 + lane * 16)};
                    Two updates[4];  // of two tokens, and of two others
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        u32 which = j % 2 ? 0x7632 : 0x5410;
                        updates[j] = Two{{bytes_of(words[0].x[j / 2], words[0].x[2 + j / 2], which),
                                          bytes_of(words[1].x[j / 2], words[1].x[2 + j / 2], which)}};
                    }
                    if (own < now.blocks) {
                        Four m = square(of_head + square_of_m + own * 32);
                        Four f = equal_rows(of_head + 16 * M_PITCH + own * 32, lane);
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
            begun[half] = number(get(factors + (lane / 4 + 8 * half) * 4));
            beta[half] = number(get(factors + 64 + (lane / 4 + 8 * half) * 4));
        }
        Two t_even = get2(factors + 128 + lane % 4 * 8), t_odd = get2(factors + 160 + lane % 4 * 8);
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
        Four f = equal_rows(of_head + 16 * M_PITCH + now.blocks * 32, lane);
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
