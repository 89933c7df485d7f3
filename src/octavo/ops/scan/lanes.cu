// A lane's instructions by name, ahead of kernels in CUDA C++ that a CPU can run too (see tests/states/lanes.h). HALF:
// 16-bit numbers are float16, else bfloat16. No multiplication and addition is fused.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

struct Four { u32 x[4]; };
struct Two { u32 x[2]; };

__device__ inline u32 thread() { return threadIdx.x; }
__device__ inline u32 block() { return blockIdx.x; }
__device__ inline u32 blocks() { return gridDim.x; }

__device__ inline void copy16(u32 to, u64 from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ inline void copy4(u32 to, u64 from, u32 bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" :: "r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ inline void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ inline void arrived() { asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory"); }
__device__ inline void together() { asm volatile("bar.sync 0;" ::: "memory"); }
__device__ inline void some_together(u32 barrier, u32 count) {
    asm volatile("bar.sync %0, %1;" :: "r"(barrier), "r"(count) : "memory");
}
__device__ inline void tell_some(u32 barrier, u32 count) {  // those who wait there
    asm volatile("bar.arrive %0, %1;" :: "r"(barrier), "r"(count) : "memory");
}
__device__ inline void warp_together() { __syncwarp(); }
__device__ inline void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ inline void wait_for_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Hopper's copy engine, out of shared memory, asked by a lane: what was put there is seen by it behind `seen_by_groups`,
// and may be put over once it was read.
struct alignas(64) Map { u64 x[16]; };  // of lines of 128 numbers of 32 bits, in boxes of 32 by 64: see `driver.describe`
__device__ inline void send_box(const Map& map, u64, int column, int line, u32 from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
                 :: "l"((u64)&map), "r"(column), "r"(line), "r"(from) : "memory");
}
// Into shared memory: told of at a barrier there, where waits who needs it. A barrier's turn ends when as many arrived as
// it was prepared for, and all bytes that they expect; one who waits names the turn, 0 or 1.
__device__ inline void prepare(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(count) : "memory");
}
__device__ inline void prepared() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}
__device__ inline void arrive_behind_copies(u32 barrier) {  // when all that the lane asked for by `copy16` is there
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(barrier) : "memory");
}
__device__ inline void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}
__device__ inline void wait_for(u32 barrier, u32 turn) {
    asm volatile(
        "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra again; }"
        :: "r"(barrier), "r"(turn) : "memory");
}
// 128 lines of 64 numbers of 16 bits, whose parts of 16 bytes lie by exclusive or with the line's number; what leaves
// the L2 first.
__device__ inline void fetch_box(const Map& map, u64, int line, u32 to, u32 barrier) {
    asm volatile(
        "{ .reg .b64 once; createpolicy.fractional.L2::evict_first.b64 once, 1.0;"
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], once; }"
        :: "r"(to), "l"((u64)&map), "r"(0), "r"(line), "r"(barrier) : "memory");
}
// The same of 64 lines of a matrix, from a line and a column on.
__device__ inline void fetch_tile(const Map& map, u64, i64, int column, int line, u32 to, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        :: "r"(to), "l"((u64)&map), "r"(column), "r"(line), "r"(barrier) : "memory");
}
// What lies as `fetch_box` brings it, out of shared memory.
__device__ inline void send_lines(const Map& map, u64, int line, u32 from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
                 :: "l"((u64)&map), "r"(0), "r"(line), "r"(from) : "memory");
}
__device__ inline void commit_sent() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int LEFT> __device__ inline void was_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(LEFT) : "memory");
}

__device__ inline u32 get(u32 at) {
    u32 x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
    return x;
}
__device__ inline Two get2(u32 at) {
    Two y;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(y.x[0]), "=r"(y.x[1]) : "r"(at) : "memory");
    return y;
}
__device__ inline Four get4(u32 at) {
    Four y;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(y.x[0]), "=r"(y.x[1]), "=r"(y.x[2]), "=r"(y.x[3]) : "r"(at) : "memory");
    return y;
}
__device__ inline void put(u32 at, u32 x) { asm volatile("st.shared.b32 [%0], %1;" :: "r"(at), "r"(x) : "memory"); }
__device__ inline void put2(u32 at, const Two& y) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" :: "r"(at), "r"(y.x[0]), "r"(y.x[1]) : "memory");
}
__device__ inline void put4(u32 at, const Four& y) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
                 :: "r"(at), "r"(y.x[0]), "r"(y.x[1]), "r"(y.x[2]), "r"(y.x[3]) : "memory");
}
__device__ inline Four read(u64 at) {
    Four y;
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(y.x[0]), "=r"(y.x[1]), "=r"(y.x[2]), "=r"(y.x[3]) : "l"(at) : "memory");
    return y;
}
__device__ inline u32 read1(u64 at) {
    u32 x;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
    return x;
}
__device__ inline Two read2(u64 at) {
    Two y;
    asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(y.x[0]), "=r"(y.x[1]) : "l"(at) : "memory");
    return y;
}
__device__ inline u32 read_half(u64 at) {  // 16 bits
    u16 x;
    asm volatile("ld.global.b16 %0, [%1];" : "=h"(x) : "l"(at) : "memory");
    return x;
}
__device__ inline void write1(u64 at, u32 x) { asm volatile("st.global.b32 [%0], %1;" :: "l"(at), "r"(x) : "memory"); }
__device__ inline void write2(u64 at, const Two& y) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" :: "l"(at), "r"(y.x[0]), "r"(y.x[1]) : "memory");
}
__device__ inline void write(u64 at, const Four& y) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                 :: "l"(at), "r"(y.x[0]), "r"(y.x[1]), "r"(y.x[2]), "r"(y.x[3]) : "memory");
}
// 16 x 16 of a matrix of 16-bit numbers in shared memory, as the matrix unit's first operand.
__device__ inline Four square(u32 at) {
    Four y;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(y.x[0]), "=r"(y.x[1]), "=r"(y.x[2]), "=r"(y.x[3]) : "r"(at) : "memory");
    return y;
}
// The same of the matrix transposed: each of its four squares is, in place.
__device__ inline Four square_turned(u32 at) {
    Four y;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(y.x[0]), "=r"(y.x[1]), "=r"(y.x[2]), "=r"(y.x[3]) : "r"(at) : "memory");
    return y;
}
// 16 x 16 put as `square` takes them.
__device__ inline void put_square(u32 at, const Four& y) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(at), "r"(y.x[0]), "r"(y.x[1]), "r"(y.x[2]), "r"(y.x[3]) : "memory");
}
// 8 x 8 of 16-bit numbers, two a lane, transposed.
__device__ inline u32 transposed(u32 x) {
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
#if HALF
#define PRODUCT "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#define PACK "cvt.rn.f16x2.f32"
#else
#define PRODUCT "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#define PACK "cvt.rn.bf16x2.f32"
#endif
__device__ inline void multiply(float (&sum)[4], const Four& a, const Two& b) {
    asm(PRODUCT " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b.x[0]), "r"(b.x[1]));
}
__device__ inline void multiply_tf32(float (&sum)[4], const Four& a, const Two& b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b.x[0]), "r"(b.x[1]));
}
// A warp group's products, of 64 rows, a warp has 16 of; both operands and sums lie in lanes as those of a warp's. `at`:
// the second operand in shared memory, lines of 128 bytes whose parts of 16 lie by exclusive or with the line's number.
template <int N> __device__ inline void hold(float (&sums)[N][4]) {  // they change behind the compiler's back
#pragma unroll
    for (int i = 0; i < N * 4; ++i) asm volatile("" : "+f"(sums[i / 4][i % 4]) :: "memory");
}
__device__ inline void hold(int& x) { asm volatile("" : "+r"(x)); }
template <int N> __device__ inline void hold(Four (&given)[N]) {
#pragma unroll
    for (int i = 0; i < N * 4; ++i) asm volatile("" : "+r"(given[i / 4].x[i % 4]) :: "memory");
}
// Of a warp group's lanes: how many registers each has from here on.
template <int COUNT> __device__ inline void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(COUNT)); }
template <int COUNT> __device__ inline void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(COUNT)); }
__device__ inline void seen_by_groups() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ inline void group_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void group_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT, int N> __device__ inline void group_arrived(float (&sums)[N][4]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LEFT) : "memory");
    hold(sums);
}
#if HALF
#define GROUP_TYPES ".f32.f16.f16 "
#else
#define GROUP_TYPES ".f32.bf16.bf16 "
#endif
#define SUM(j) "+f"(sums[j][0]), "+f"(sums[j][1]), "+f"(sums[j][2]), "+f"(sums[j][3])
#define SUMS(j) SUM(j), SUM(j + 1), SUM(j + 2), SUM(j + 3), SUM(j + 4), SUM(j + 5), SUM(j + 6), SUM(j + 7)
#define FIRST "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3])
__device__ inline u64 tile_at(u32 at, u32 apart) {  // apart: bytes to the tile of the next 64 columns
    return (u64)(at >> 4) | (u64)(apart >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}
// By 64 lines of 16 numbers, a column each.
__device__ inline void group_multiply(float (&sums)[8][4], const Four& a, u32 at) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n64k16" GROUP_TYPES "{"
        "%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, p, 1, 1, 0; }"
        : SUMS(0) : FIRST, "l"(tile_at(at, 0)));
}
// By 16 lines of 64 columns.
#define GROUP_PRODUCT "wgmma.mma_async.sync.aligned.m64n64k16" GROUP_TYPES "{" \
    "%0, %1, %2, %3, %4, %5, %6, %7, " \
    "%8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, " \
    "%24, %25, %26, %27, %28, %29, %30, %31}, "
__device__ inline void group_multiply_turned(float (&sums)[8][4], const Four& a, u32 at) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0; " GROUP_PRODUCT "{%32, %33, %34, %35}, %36, p, 1, 1, 1; }"
                 : SUMS(0) : FIRST, "l"(tile_at(at, 0)));
}
// The first operand lies in shared memory too, 64 lines of 16 numbers. adds: to what the sums are, else to nothing.
__device__ inline void group_multiply_tiles(float (&sums)[8][4], u32 a, u32 at, bool adds) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0; " GROUP_PRODUCT "%32, %33, p, 1, 1, 0, 0; }"
                 : SUMS(0) : "l"(tile_at(a, 0)), "l"(tile_at(at, 0)), "r"((int)adds));
}
__device__ inline void group_multiply_tile_turned(float (&sums)[8][4], u32 a, u32 at, bool adds) {  // by 16 lines of 64 columns
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0; " GROUP_PRODUCT "%32, %33, p, 1, 1, 0, 1; }"
                 : SUMS(0) : "l"(tile_at(a, 0)), "l"(tile_at(at, 0)), "r"((int)adds));
}
// By 16 lines of 128 columns, of which the second half is another tile.
__device__ inline void group_multiply_turned(float (&sums)[16][4], const Four& a, u32 at, u32 apart) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n128k16" GROUP_TYPES "{"
        "%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, "
        "%40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, "
        "%56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, p, 1, 1, 1; }"
        : SUMS(0), SUMS(8) : FIRST, "l"(tile_at(at, apart)));
}
__device__ inline u32 pack(float low, float high) {
    u32 both;
    asm(PACK " %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
__device__ inline u32 from_lane(u32 x, u32 lane) { return __shfl_sync(0xffffffffu, x, lane); }
__device__ inline u32 bits_of(float x) { return __float_as_uint(x); }
__device__ inline float number(u32 x) { return __uint_as_float(x); }
__device__ inline float times(float x, float y) { return __fmul_rn(x, y); }
__device__ inline float plus(float x, float y) { return __fadd_rn(x, y); }
__device__ inline float less(float x, float y) { return __fsub_rn(x, y); }
// As Triton's `/`, `div_rn`, `sqrt_rn` and `exp`.
__device__ inline float over(float x, float y) {
    float z;
    asm("div.full.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}
__device__ inline float over_exact(float x, float y) { return __fdiv_rn(x, y); }
__device__ inline float root(float x) { return __fsqrt_rn(x); }
__device__ inline float exponential(float x) {
    float z;
    asm("ex2.approx.f32 %0, %1;" : "=f"(z) : "f"(__fmul_rn(x, 1.4426950408889634f)));
    return z;
}
__device__ inline int count_bits(u32 x) { return __popc(x); }
__device__ inline u32 bytes_of(u32 x, u32 y, u32 which) { return __byte_perm(x, y, which); }
__device__ inline float widened(u32 x) {  // a 16-bit number
#if HALF
    float y;
    asm("{ .reg .b16 h; mov.b16 h, %1; cvt.f32.f16 %0, h; }" : "=f"(y) : "h"((u16)x));
    return y;
#else
    return __uint_as_float(x << 16);
#endif
}
