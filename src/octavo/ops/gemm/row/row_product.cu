// A product of one row on Hopper, whose weights wait in shared memory: the kernel of octavo.ops.gemm.row.row_product,
// behind compile/lanes.cu, the matrix unit's `step` and row_norm.cu.
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

extern "C" __global__ void __launch_bounds__(128) row_product(const __grid_constant__ Told told) {
    let_next_begin();
    const u32 lane = thread() % 32, warp = thread() / 32, base = (u32)__cvta_generic_to_shared(memory);
    static_assert(PIECES % 16 == 0, "a thread has whole turns");
    for (u32 group = 0; group < LINES / 8; ++group) {
        u32 line = group * 8 + thread() % 8;
        u32 channel = block() * CHANNELS + (line < CHANNELS ? line : told.ups + line - CHANNELS);
        u64 own = told.weight + 2 * ((u64)channel * K + thread() / 8 * 8);
        u32 to = base + WEIGHTS + 16 * (group * 8 * PIECES + thread());
#pragma unroll 16
        for (u32 turn = 0; turn < PIECES / 16; ++turn) copy16(to + 2048 * turn, own + 256 * turn, 16);
    }
    commit();
    wait_for_before();
    const u32 own = block() * CHANNELS + thread() % CHANNELS;
    u32 before = ADD ? read16(told.residual + 2 * own) : 0;
    if (NORM)
        norm_row<K>(told.x, told.norm, told.eps, base + ROW, lane, warp);
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
