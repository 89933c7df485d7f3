// What becomes of a product's sums, put behind the ring's text: each is rounded once. GATED: what is written is the
// gates' activation (TANH: gelu's, else silu) times the ups; SQUARED: the squares of those above 0, else 0. Set too:
// HALF (float16, not bfloat16).

__device__ inline u32 pack(float low, float high) {
    u32 both;
    if (HALF) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ inline float low(u32 both) {
    float value;
    if (HALF) asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; }" : "=f"(value) : "r"(both));
    else asm("shl.b32 %0, %1, 16;" : "=f"(value) : "r"(both));
    return value;
}

__device__ inline float high(u32 both) {
    float value;
    if (HALF) asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h; }" : "=f"(value) : "r"(both));
    else asm("and.b32 %0, %1, 0xffff0000;" : "=f"(value) : "r"(both));
    return value;
}

// The arithmetic of octavo.ops.activation.gpu, with the instructions that Triton makes of it.
__device__ inline float activated(float gate, float up) {
    float exponent, power, ratio;
    if (TANH) {
        float square = __fmul_rn(gate, gate);
        float inner = __fadd_rn(__fmul_rn(square, 0.044715f), 1.0f);
        exponent = __fmul_rn(__fmul_rn(gate, inner), -1.5957691216057308f);
    } else {
        exponent = 0.0f - gate;
    }
    asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(__fmul_rn(exponent, 1.4426950408889634f)));
    asm("div.full.f32 %0, %1, %2;" : "=f"(ratio) : "f"(gate), "f"(__fadd_rn(power, 1.0f)));
    return __fmul_rn(ratio, up);
}

// The square of max(value, 0) of a pair of rounded results, rounded.
__device__ inline u32 squared(u32 both) {
    float a = fmaxf(low(both), 0.0f), b = fmaxf(high(both), 0.0f);
    return pack(__fmul_rn(a, a), __fmul_rn(b, b));
}

// Four matrices of 8 by 8, each turned or not, to the lines that the lanes name.
template <bool TURNED>
__device__ inline void store_four(u32 to, u32 a, u32 b, u32 c, u32 d) {
    if (TURNED)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                     :: "r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
    else
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                     :: "r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
