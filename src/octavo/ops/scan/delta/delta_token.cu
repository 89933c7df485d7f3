// What the delta rule's kernels share beside kept.cu: what a token brings.

#define SIZE 128  // of a head's keys, and of its values

// The sum of eight channels' squares, as `octavo.ops.compile.row_sum.row_sums` begins.
__device__ inline float sum_of_squares(const Four& given) {
    float sum[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float x = widened(i % 2 ? given.x[i / 2] >> 16 : given.x[i / 2] & 0xffff);
        sum[i] = times(x, x);
    }
    return plus(plus(plus(sum[0], sum[1]), plus(sum[2], sum[3])), plus(plus(sum[4], sum[5]), plus(sum[6], sum[7])));
}

__device__ inline float one_over_norm(float squares) { return over_exact(1.0f, root(plus(squares, 1e-6f))); }

__device__ inline Four scaled(const Four& given, float factor) {
    Four found;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        found.x[i] = pack(times(widened(given.x[i] & 0xffff), factor), times(widened(given.x[i] >> 16), factor));
    return found;
}

// Eight channels of the token's query (lanes 0 to 15) or key, of norm 1; see `octavo.ops.compile.row_sum.row_sums`.
__device__ inline Four normed(const Four& given, float scale, u32 lane) {
    float total = sum_of_squares(given);
#pragma unroll
    for (u32 apart = 8; apart > 0; apart /= 2) total = plus(total, number(from_lane(bits_of(total), lane ^ apart)));
    float factor = one_over_norm(total);
    return scaled(given, lane < 16 ? times(factor, scale) : factor);
}

// Second operands of two products, of 16 columns, from rows of 16-bit numbers: row n of the 16 at `at` is column n.
__device__ inline Four columns(u32 at, u32 pitch, u32 lane) {
    return square(at + (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 16);
}
