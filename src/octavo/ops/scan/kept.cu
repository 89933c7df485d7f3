// What kernels of layers with states share: where things are kept, and how steps of time are made.

// Constants of a tensor that is kept: see `octavo.ops.scan.kept.Form`.
struct Form {
    i64 block, part, line;
    int lines, of_item, runs, parts, blocks;
};
#ifndef CHUNK
#define CHUNK 64
#endif

// Where run `run` of the item at `offset` of `entry` begins, in elements; `held`: the block, 0 if nothing is kept.
__device__ inline i64 place(const int* table, int first_part, int entry, int offset, int run, int width, const Form& form, int& held) {
    int line = offset * form.of_item + run / form.runs, part = first_part + line / form.lines;
    held = table[entry * form.blocks + part / form.parts];
    return held * form.block + part % form.parts * form.part + line % form.lines * form.line + run % form.runs * (i64)width;
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

// Addresses in shared memory.
__device__ inline u64 address_at(u32 at) {
    Two two = get2(at);
    return two.x[0] | (u64)two.x[1] << 32;
}
__device__ inline void put_address(u32 at, u64 x) { put(at, (u32)x), put(at + 4, (u32)(x >> 32)); }

// Of a tile, where 16 bytes of a line lie.
__device__ inline u32 in_tile(u32 line, u32 part) { return line * 128 + (part ^ line % 8) * 16; }
// A place in a ring of COUNT, and which of its turns it is.
template <int COUNT> struct Turn {
    u32 place = 0, turn = 0;
    __device__ inline void next() {
        if (++place == COUNT) place = 0, turn ^= 1;
    }
};
