// The gated delta rule where rows decode, in one kernel, with the states behind chunks that end. Told of and launched by delta_step.py.
//
// A task is a row and a head of its keys, with those of the values that share it. Of a block's warps the last one, the
// scout, finds where a task's things lie, brings the chunk's keys, sums and rates, and makes the token's: query and key of
// norm 1, and of each head its gates, a rate and the sum behind the one before. Key, sum and rate are kept. The scout is a
// task ahead of the others, for which it makes T's row meanwhile. Each of those takes 32 channels of one head. Its states,
// updates and values come by asynchronous copies into a ring of its own, SLOT bytes a step, ROUND steps a task, on past
// the end of each task to the next: memory never waits for a task. Eight lanes copy 128 bytes that lie together, so that
// the L2 is asked for whole lines; lines lie in a step by exclusive or, and no two lanes meet in a bank, of those that
// read, four rows at once, nor of those that copy. Column n of the product j of four is channel 4 n + j.
//
// Invariant: the operations on a head are those of `delta_ready`, `delta_decode` and `delta_advance`, in the same order; where those
// multiply by zeros, they are left out.

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
                copy16(to + r * 512 + at, of.state ? from : nowhere, of.state ? 16 : 0);
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
#pragma unroll 1
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

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) delta_step(const __grid_constant__ Told told) {
    let_next_begin();
    extern __shared__ __align__(128) unsigned char memory[];
    u32 base = (u32)__cvta_generic_to_shared(memory);
    u32 warp = thread() / 32, lane = thread() % 32, ring = base + warp * (DEPTH * SLOT), made = base + MADE_AT;
    int tasks = told.num_rows * KEY_HEADS, task = block(), by = blocks();
    if (warp == WARPS) {
        find(told, task, base + PLACES_AT, lane);
        together();
        // Read before the wait, as states and tables are: what earlier passes kept of a row that decodes no kernel of this
        // pass writes but this one, and none of theirs still runs, nor a copy of blocks or a load, since a pass begins with
        // a kernel that waits for all ahead of it before it lets the next begin (see `octavo.ops.compile.launch`).
        Row row = row_of(told, task);
        bring_kept(told, row, task, base + BROUGHT_AT, lane);
        wait_for_before();
        bring_own(told, row, task, base + BROUGHT_AT, lane);
        for (int round = 0; task < tasks; ++round, task += by) {
            together();
            int here = (int)(get(base + PLACES_AT + round % 2 * PLACES_BYTES + LAST) % 16);
            find(told, task + by, base + PLACES_AT + (round + 1) % 2 * PLACES_BYTES, lane);
            some_together(1, THREADS);  // triangles are there
            for (int head = lane / 16; head < PER; head += 2) invert(head, made, here, lane);
            warp_together();
            tell_some(2, THREADS);
            row = row_of(told, task + by);
            bring_kept(told, row, task + by, base + BROUGHT_AT + (round + 1) % 2 * BROUGHT_BYTES, lane);
            bring_own(told, row, task + by, base + BROUGHT_AT + (round + 1) % 2 * BROUGHT_BYTES, lane);
            warp_together();
        }
        return;
    }
    together();
    u32 own_head = warp / 4, of_head = made + own_head * MADE_BYTES;
    u32 channels = ((task % KEY_HEADS * PER + own_head) * SIZE + warp % 4 * 32) * 2;
    Ahead now = ahead_of(told, task, base + PLACES_AT, warp, lane), then{};
#pragma unroll
    for (int step = 0; step < DEPTH - 1; ++step) ask(step, ring + step * SLOT, told, now, channels, 0, lane);
    wait_for_before();
    u32 use = 0;  // the ring's place that is read next
    u32 state_at = lane % 4 * 256 + (lane / 4 ^ lane % 4 * 2) * 16;
    u32 update_at = lane % 4 * 128 + (lane / 8 ^ lane % 4 * 2) * 16 + lane / 4 % 2 * 8;
    for (int round = 0; task < tasks; ++round, task += by) {
        together();  // what the scout brings of this task is there; nobody is behind
        u32 brought = base + BROUGHT_AT + round % 2 * BROUGHT_BYTES;
        u32 next_channels = (((task + by) % KEY_HEADS * PER + own_head) * SIZE + warp % 4 * 32) * 2;
        int last = (int)(get(now.places + LAST) % CHUNK), here = last % 16, blocks = last / 16;
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
            if (step == DEPTH - 2) {  // behind what came ahead, so that the ring goes on meanwhile
                for (int tile = warp; tile < 2 * blocks + 2; tile += WARPS) compare(tile, brought, made, last, lane);
                tell_some(1, THREADS);
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
        some_together(2, THREADS);  // T is there, all that others made, and where all of the next task lies
        then = ahead_of(told, task + by, base + PLACES_AT + (round + 1) % 2 * PLACES_BYTES, warp, lane);
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
        if (last == CHUNK - 1) {
            warp_together();  // the update is there
            advance(told, task, now.places, brought, channels, lane);
        }
        now = then;
        channels = next_channels;
    }
}
