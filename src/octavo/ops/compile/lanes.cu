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
__device__ inline void copy8(u32 to, u64 from, u32 bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" :: "r"(to), "l"(from), "r"(bytes) : "memory");
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
