// A product of one row on Hopper, whose weights wait in shared memory: the kernel of octavo.ops.gemm.row.row_product,
// behind compile/lanes.cu and the matrix unit's `step`.
//
// A block has LINES lines of the weight: so many channels, or half as many gates and their ups. Lines lie in groups of 8,
// of which 16 bytes each lie side by side, as the matrix unit reads them; the row lies flat, and is the first of 64
// lines of which the others are whatever follows in memory. One chain over K in steps of 16: as mma.sync's, in less time.

struct Told {
    u64 x, norm, weight, residual, out;
    u32 ups;  // the weight's line of the first up
    float eps;
};

constexpr u32 PIECES = K / 8;                       // of 16 bytes, of a line
constexpr u32 CHANNELS = GATED ? LINES / 2 : LINES;
constexpr u32 ROW = 0, SUMS = 2 * K + 128, WEIGHTS = (SUMS + 4 * LINES + 127) / 128 * 128;
constexpr u32 CHUNKS = K / 256;                     // of 8 numbers, of a lane

extern __shared__ __align__(128) unsigned char memory[];

// The sum of squares of the row in the order of octavo.ops.compile.row_sum, in every lane of a warp.
__device__ inline float squares(u64 x, u32 lane) {
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
__device__ inline void norm_row(const Told& told, u32 to, u32 lane, u32 warp) {
    float inverse = over_exact(1.0f, root(plus(over_exact(squares(told.x, lane), (float)K), told.eps)));
    for (u32 chunk = 4 * lane + warp; chunk < PIECES; chunk += 128) {
        Four eight = read(told.x + 16 * chunk), low = read(told.norm + 32 * chunk), high = read(told.norm + 32 * chunk + 16);
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

extern "C" __global__ void __launch_bounds__(128) row_product(const __grid_constant__ Told told) {
    let_next_begin();
    const u32 lane = thread() % 32, warp = thread() / 32, base = (u32)__cvta_generic_to_shared(memory);
    for (u32 i = thread(); i < LINES * PIECES; i += 128) {
        u32 line = i / (8 * PIECES) * 8 + i % 8, piece = i / 8 % PIECES;
        u32 channel = block() * CHANNELS + (line < CHANNELS ? line : told.ups + line - CHANNELS);
        copy16(base + WEIGHTS + 16 * i, told.weight + 2 * ((u64)channel * K + 8 * piece), 16);
    }
    commit();
    wait_for_before();
    const u32 own = block() * CHANNELS + thread() % CHANNELS;
    u32 before = ADD ? read16(told.residual + 2 * own) : 0;
    if (NORM)
        norm_row(told, base + ROW, lane, warp);
    else
        for (u32 i = thread(); i < PIECES; i += 128) put4(base + ROW + 16 * i, read(told.x + 16 * i));
    arrived<0>();
    begin_copies();  // the matrix unit reads as the copy engine does
    together();
    float sum[LINES / 2];
#pragma unroll
    for (u32 i = 0; i < LINES / 2; ++i) sum[i] = 0;
    u64 row = described(base + ROW, 16, 0), weights = described(base + WEIGHTS, 128, 16 * K);
    begin_steps(sum);
#pragma unroll 1
    for (u32 i = 0; i < K / 256; ++i, row += 32, weights += 256)
#pragma unroll
        for (u32 j = 0; j < 16; ++j) step(sum, row + 2 * j, weights + 16 * j);
    end_steps(sum);
    if (warp) return;
    if (lane < 4)
#pragma unroll
        for (u32 i = 0; i < LINES / 8; ++i) {
            put(base + SUMS + 32 * i + 8 * lane, bits_of(sum[4 * i]));
            put(base + SUMS + 32 * i + 8 * lane + 4, bits_of(sum[4 * i + 1]));
        }
    warp_together();
    for (u32 channel = lane; channel < CHANNELS; channel += 32) {
        float value = rounded(number(get(base + SUMS + 4 * channel)));
        if (GATED) {
            float up = rounded(number(get(base + SUMS + 4 * (channel + CHANNELS))));
            value = times(over(value, plus(exponential(-value), 1.0f)), up);
        }
        if (ADD) value = plus(value, widened(before));
        write16(told.out + 2 * (block() * CHANNELS + channel), pack(value, value) & 0xffff);
    }
}
