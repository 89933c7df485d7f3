// A row's state behind a chunk, where its token ends one: what a warp of delta_step.cu does of its 32 channels, 16 after
// 16. The order of sums is that of `delta_advance`, and the new state may take the old one's place: no other warp reads
// these channels. Column n of the product j of two is channel 2 n + j.

// channels: see `ask`. The step's own update is kept already.
__device__ inline void advance(const Told& told, int task, u32 places, u32 brought, u32 channels, u32 lane) {
    constexpr Form states{STATE_FORM};
    Row row = row_of(told, task);
    u32 head = channels / (2 * SIZE), own_head = head % PER;
    const int* table = told.state_table + row.table_row * told.state_columns;
    int held;
    u64 goal = place(table, told.state_first, row.last() / CHUNK, 0, head * SIZE, SIZE, states, held);
    if (held <= 0) return;
    u64 source = address_at(places + STATES + own_head * 8);
    goal = (u64)(told.state + goal);
    u32 sums = brought + SUMS + own_head * 256;
    float last = number(get(sums + (CHUNK - 1) * 4)), decay = exponential(last);
#pragma unroll 1
    for (u32 begin = 0; begin < 32; begin += 16) {
        Two updates[4][2];
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            u32 words[4];  // of two channels of two tokens, and of the two that are eight on
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int token = step * 16 + lane % 4 * 2 + i % 2 + i / 2 * 8;
                u64 from = address_at(places + (token == CHUNK - 1 ? GOALS : UPDATES + token * 8));
                words[i] = from ? read1(from + channels + begin * 2 + lane / 4 * 4) : 0;
            }
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                u32 which = j ? 0x7632 : 0x5410;
                updates[step][j] = Two{{bytes_of(words[0], words[1], which), bytes_of(words[2], words[3], which)}};
            }
        }
        u32 at = (lane / 4 * SIZE + channels / 2 % SIZE + begin + lane % 4 * 4) * 4;  // of four channels of a key
#pragma unroll 1
        for (u32 keys = 0; keys < SIZE; keys += 16, at += 16 * SIZE * 4) {
            float state[2][4];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                Four four = source ? read(source + at + i * 8 * SIZE * 4) : Four{};
#pragma unroll
                for (int part = 0; part < 4; ++part) state[part % 2][2 * i + part / 2] = times(decay, number(four.x[part]));
            }
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                Four key = square_turned(brought + (step * 16 + lane / 16 * 8 + lane % 8) * PITCH + keys * 2 + lane / 8 % 2 * 16);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    Two own = get2(sums + (step * 16 + half * 8 + lane % 4 * 2) * 4);
                    float low = exponential(less(last, number(own.x[0]))), high = exponential(less(last, number(own.x[1])));
#pragma unroll
                    for (int i = 2 * half; i < 2 * half + 2; ++i)
                        key.x[i] = pack(times(widened(key.x[i] & 0xffff), low), times(widened(key.x[i] >> 16), high));
                }
                multiply(state[0], key, updates[step][0]);
                multiply(state[1], key, updates[step][1]);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i)
                write(goal + at + i * 8 * SIZE * 4, Four{{bits_of(state[0][2 * i]), bits_of(state[1][2 * i]),
                                                          bits_of(state[0][2 * i + 1]), bits_of(state[1][2 * i + 1])}});
        }
    }
}
