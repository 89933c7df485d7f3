// A row that four warps norm, as octavo.ops.norm.gpu does, behind compile/lanes.cu.

__device__ inline void begin_copies() {  // they see what threads have written
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ inline u32 read16(u64 at) {
    u16 x;
    asm volatile("ld.global.b16 %0, [%1];" : "=h"(x) : "l"(at) : "memory");
    return x;
}
__device__ inline void write16(u64 at, u32 x) {
    asm volatile("st.global.b16 [%0], %1;" :: "l"(at), "h"((u16)x) : "memory");
}
__device__ inline u64 read8(u64 at) {
    u64 x;
    asm volatile("ld.global.b64 %0, [%1];" : "=l"(x) : "l"(at) : "memory");
    return x;
}
__device__ inline void write4(u64 at, u32 x) { asm volatile("st.global.b32 [%0], %1;" :: "l"(at), "r"(x) : "memory"); }
__device__ inline float rounded(float x) { return widened(pack(x, x) & 0xffff); }

// Four warps' matrix unit, which reads shared memory by descriptors: groups of 8 lines of 16 bytes, 8 of k, side by side.
__device__ inline u64 described(u32 at, u32 k_step, u32 group_step) {
    return (u64)(at >> 4 & 0x3fff) | (u64)(k_step >> 4) << 16 | (u64)(group_step >> 4) << 32;
}
template <int COUNT> __device__ inline void begin_steps(float (&sum)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(sum[i]) :: "memory");
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
template <int COUNT> __device__ inline void end_steps(float (&sum)[COUNT]) {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(sum[i]) :: "memory");
}

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

