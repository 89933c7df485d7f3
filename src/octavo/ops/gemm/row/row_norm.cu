// A row that four warps norm, as octavo.ops.norm.gpu does, behind compile/lanes.cu.

extern __shared__ __align__(128) unsigned char memory[];

// The sum of squares of the row in the order of octavo.ops.compile.row_sum, in every lane of a warp.
template <u32 SIZE> __device__ inline float squares(u64 x, u32 lane) {
    constexpr u32 CHUNKS = SIZE / 256;  // of 8 numbers, of a lane
    float part[CHUNKS];
#pragma unroll
    for (u32 j = 0; j < CHUNKS; ++j) {
        Four eight = read(x + 16 * (lane + 32 * j));
        float pair[4];
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            float low = widened(eight.x[i] & 0xffff), high = widened(eight.x[i] >> 16);
            pair[i] = plus(times(low, low), times(high, high));
        }
        part[j] = plus(plus(pair[0], pair[1]), plus(pair[2], pair[3]));
    }
#pragma unroll
    for (u32 half = CHUNKS / 2; half; half /= 2)
#pragma unroll
        for (u32 j = 0; j < half; ++j) part[j] = plus(part[j], part[j + half]);
    float total = part[0];
#pragma unroll
    for (u32 half = 16; half; half /= 2) total = plus(total, number(from_lane(bits_of(total), lane ^ half)));
    return total;
}

// A row is normed by all warps, and each writes its part.
template <u32 SIZE> __device__ inline void norm_row(u64 x, u64 norm, float eps, u32 to, u32 lane, u32 warp) {
    float inverse = over_exact(1.0f, root(plus(over_exact(squares<SIZE>(x, lane), (float)SIZE), eps)));
    for (u32 chunk = 4 * lane + warp; chunk < SIZE / 8; chunk += 128) {
        Four eight = read(x + 16 * chunk), low = read(norm + 32 * chunk), high = read(norm + 32 * chunk + 16);
        Four done;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            float first = number(i < 2 ? low.x[2 * i] : high.x[2 * i - 4]);
            float second = number(i < 2 ? low.x[2 * i + 1] : high.x[2 * i - 3]);
            first = times(times(widened(eight.x[i] & 0xffff), inverse), first);
            second = times(times(widened(eight.x[i] >> 16), inverse), second);
            done.x[i] = pack(first, second);
        }
        put4(to + 16 * chunk, done);
    }
}

