// Vectors, number formats and threads for Octavo's native CPU operators.
//
// One source, several instruction sets: `vf` is the widest float vector of the target (16 lanes with AVX-512, 8 with
// AVX2, 4 otherwise). Invariant: nothing here lets the vector width, the compiler or the thread count into a result.
// Fused multiply-adds are always explicit (the build forbids contraction), reductions go through the fixed 16-lane
// tree below, and vexp uses only IEEE add, multiply and integer steps, so its torch twin gives the same bits.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define OCTAVO_API extern "C" __attribute__((visibility("default")))
#define OCTAVO_INLINE inline __attribute__((always_inline))
#define OCTAVO_UNROLL _Pragma("GCC unroll 64")

namespace octavo {

#if defined(__AVX512F__)
constexpr int VL = 16;
#elif defined(__AVX2__)
constexpr int VL = 8;
#else
constexpr int VL = 4;
#endif

typedef float vf __attribute__((vector_size(4 * VL)));
typedef int32_t vi __attribute__((vector_size(4 * VL)));
typedef uint32_t vu __attribute__((vector_size(4 * VL)));

// Codes of element types across the C ABI (octavo.ops.native.DTYPE_CODES).
enum DType : int32_t { F32 = 0, BF16 = 1, FP8 = 2, INT8 = 3 };

struct bf16 {
    uint16_t bits;
};
struct fp8 {  // e4m3fn: no infinities, 0x7f is NaN, 448 the largest
    uint8_t bits;
};

// ---- loads, stores, lanes ----------------------------------------------------------------------------------------

template <class V, class T>
OCTAVO_INLINE V load_bits(const T* p) {
    V v;
    std::memcpy(&v, p, sizeof(V));
    return v;
}
OCTAVO_INLINE vf load(const float* p) { return load_bits<vf>(p); }
OCTAVO_INLINE void store(float* p, vf v) { std::memcpy(p, &v, sizeof(v)); }
OCTAVO_INLINE vf splat(float x) { return x - vf{}; }
OCTAVO_INLINE vi as_int(vf v) { return (vi)v; }
OCTAVO_INLINE vf as_float(vi v) { return (vf)v; }
OCTAVO_INLINE vf as_float(vu v) { return (vf)v; }

// a * b + c rounded once.
OCTAVO_INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    vf r;
    for (int i = 0; i < VL; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return r;
#endif
}
OCTAVO_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// The larger lane; where b is NaN the result is b, so vmax(limit, x) passes a NaN x on.
OCTAVO_INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }
OCTAVO_INLINE vf vmin(vf a, vf b) { return a < b ? a : b; }

// ---- bfloat16 ----------------------------------------------------------------------------------------------------

OCTAVO_INLINE float to_float(float x) { return x; }
OCTAVO_INLINE float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
// Round to nearest, ties to even; every NaN becomes 0x7fc0 (torch's rule).
OCTAVO_INLINE bf16 to_bf16(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    if (x != x) return bf16{0x7fc0};
    return bf16{uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
}
OCTAVO_INLINE void from_float(float x, float* out) { *out = x; }
OCTAVO_INLINE void from_float(float x, bf16* out) { *out = to_bf16(x); }

OCTAVO_INLINE vf load(const bf16* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
    vf r;
    for (int i = 0; i < VL; ++i) r[i] = to_float(p[i]);
    return r;
#endif
}
// The bfloat16 bits of each lane in the low half of its 32-bit word.
OCTAVO_INLINE vu bf16_bits(vf v) {
    vu u = (vu)v;
    vu rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    return v == v ? rounded : vu{} + 0x7fc0;
}
OCTAVO_INLINE void store(bf16* p, vf v) {
    vu bits = bf16_bits(v);
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)bits));
#elif defined(__AVX2__)
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)bits, (__m256i)bits), 0xd8);
    _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
#else
    for (int i = 0; i < VL; ++i) p[i].bits = uint16_t(bits[i]);
#endif
}

// ---- int8 --------------------------------------------------------------------------------------------------------

OCTAVO_INLINE vf load(const int8_t* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    vf r;
    for (int i = 0; i < VL; ++i) r[i] = float(p[i]);
    return r;
#endif
}

// Round to nearest, ties to even, cut to +-127; NaN becomes 0.
OCTAVO_INLINE void store(int8_t* p, vf v) {
    v = vmin(splat(127.0f), vmax(splat(-127.0f), v));
    vf rounded = (v + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23 leaves no bits of a fraction
    for (int i = 0; i < VL; ++i) p[i] = rounded[i] == rounded[i] ? int8_t(rounded[i]) : int8_t(0);
}

// ---- float8 e4m3fn -----------------------------------------------------------------------------------------------

// Exponent and mantissa in float's places read 2^120 too small, subnormals included.
OCTAVO_INLINE vf load(const fp8* p) {
    vu bits;
#if defined(__AVX512F__)
    bits = (vu)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
    bits = (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
    for (int i = 0; i < VL; ++i) bits[i] = p[i].bits;
#endif
    vu size = bits & 0x7f;
    vf magnitude = as_float(size << 20) * 1.329227995784916e36f;
    vf signed_value = as_float((vu)magnitude | ((bits & 0x80) << 24));
    return size == 0x7f ? as_float(vu{} + 0x7fc00000) : signed_value;
}
// Cut to +-448, round to nearest, ties to even; NaN stays NaN.
OCTAVO_INLINE void store(fp8* p, vf v) {
    vf cut = vmin(splat(448.0f), vmax(splat(-448.0f), v));
    vu bits = (vu)cut, sign = (bits >> 24) & 0x80, size = bits & 0x7fffffff;
    vu normal = (size + (uint32_t(7 - 127) << 23) + 0x7ffff + ((size >> 20) & 1)) >> 20;
    vu subnormal = (vu)(as_float(size) + 16384.0f) - 0x46800000;  // 2^14: its last place is 2^-9
    vu result = size < 0x3c800000 ? subnormal : normal;  // below 2^-6
    result = cut == cut ? result : vu{} + 0x7f;
    for (int i = 0; i < VL; ++i) p[i].bits = uint8_t(result[i] | sign[i]);
}

// The first n <= VL lanes; the others read as zero and are not written. Of all lanes nothing is copied in between.
template <class T>
OCTAVO_INLINE vf load_first(const T* p, int64_t n) {
    if (n == VL) return load(p);
    T tail[VL] = {};
    std::memcpy(tail, p, sizeof(T) * n);
    return load(tail);
}
template <class T>
OCTAVO_INLINE void store_first(T* p, vf v, int64_t n) {
    if (n == VL) return store(p, v);
    T tail[VL];
    store(tail, v);
    std::memcpy(p, tail, sizeof(T) * n);
}

// ---- the fixed 16-lane reduction ---------------------------------------------------------------------------------

// Sixteen float lanes on every instruction set. Sums and maxima taken lane-wise in `lanes16` and closed by `reduce_*`
// (lane i with i + 8, then 4, 2, 1) have the same bits with AVX-512, AVX2 and NEON.
struct lanes16 {
    static constexpr int NV = 16 / VL;
    vf v[NV];

    static OCTAVO_INLINE lanes16 splat(float x) {
        lanes16 r;
        for (int i = 0; i < NV; ++i) r.v[i] = octavo::splat(x);
        return r;
    }
    template <class T>
    static OCTAVO_INLINE lanes16 load(const T* p) {
        lanes16 r;
        for (int i = 0; i < NV; ++i) r.v[i] = octavo::load(p + i * VL);
        return r;
    }
    template <class T>
    OCTAVO_INLINE void store(T* p) const {
        for (int i = 0; i < NV; ++i) octavo::store(p + i * VL, v[i]);
    }
};
OCTAVO_INLINE lanes16 fma(const lanes16& a, const lanes16& b, const lanes16& c) {
    lanes16 r;
    for (int i = 0; i < lanes16::NV; ++i) r.v[i] = fma(a.v[i], b.v[i], c.v[i]);
    return r;
}
typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x4 __attribute__((vector_size(16)));
template <class Op>
OCTAVO_INLINE float reduce16(const lanes16& a, Op op) {
#if defined(__AVX512F__)
    const __m512d all = _mm512_castps_pd((__m512)a.v[0]);
    f32x8 x = op((f32x8)_mm512_maskz_extractf64x4_pd(255, all, 0), (f32x8)_mm512_maskz_extractf64x4_pd(255, all, 1));
    f32x4 y = op((f32x4)_mm256_castps256_ps128((__m256)x), (f32x4)_mm256_extractf128_ps((__m256)x, 1));
#else
    float t[16];
    a.store(t);
    f32x8 x = op(load_bits<f32x8>(t), load_bits<f32x8>(t + 8));
    std::memcpy(t, &x, sizeof(x));
    f32x4 y = op(load_bits<f32x4>(t), load_bits<f32x4>(t + 4));
#endif
    float s0 = op(y[0], y[2]), s1 = op(y[1], y[3]);
    return op(s0, s1);
}
struct AddOp {
    template <class V>
    OCTAVO_INLINE V operator()(V a, V b) const { return a + b; }
};
struct MaxOp {
    template <class V>
    OCTAVO_INLINE V operator()(V a, V b) const { return a > b ? a : b; }
};
OCTAVO_INLINE float reduce_add(const lanes16& a) { return reduce16(a, AddOp{}); }
OCTAVO_INLINE float reduce_max(const lanes16& a) { return reduce16(a, MaxOp{}); }

// ---- exp ---------------------------------------------------------------------------------------------------------

// e^x within 1 ulp over the whole range: inf above 88.73, denormals, then 0 below -103.97; NaN stays NaN.
// Cephes' expf polynomial after a two-part ln 2 reduction. No fused multiply-add: octavo.ops.activation.exp_reference
// is the same steps in torch, bit for bit.
OCTAVO_INLINE vf vexp(vf x) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer, ties to even
    x = vmin(splat(89.0f), vmax(splat(-104.0f), x));
    vf shifted = x * 1.44269504088896341f + magic;
    vi n = as_int(shifted) - 0x4b400000;
    vf nf = shifted - magic;
    vf r = x - nf * 0.693359375f;
    r = r - nf * -2.12194440e-4f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r;
    p = p + 1.0f;
    vi half = n >> 1;  // 2^n in two steps: 2^128 and 2^-149 are out of one exponent field's range
    return (p * as_float((half + 127) << 23)) * as_float((n - half + 127) << 23);
}
OCTAVO_INLINE float vexp(float x) { return vexp(splat(x))[0]; }

// ---- memory and threads ------------------------------------------------------------------------------------------

// A growing buffer, 64-byte aligned; declare it `static thread_local`. Contents do not survive growth.
class Scratch {
  public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { std::free(data_); }  // a thread's ends with it: callers' threads come and go

    float* floats(int64_t count) { return static_cast<float*>(bytes(count * 4)); }
    void* bytes(int64_t size);

  private:
    void* data_ = nullptr;
    int64_t size_ = 0;
};

// An array of floats that a task works with.
struct Piece {
    float** place;
    int64_t size;
};

// Gives every piece its place in `memory`, a cache line or more behind the one before.
OCTAVO_INLINE void carve(Scratch& memory, std::initializer_list<Piece> pieces) {
    int64_t all = 0;
    for (const Piece& piece : pieces) all += piece.size + 16;
    float* next = memory.floats(all);
    for (const Piece& piece : pieces) {
        *piece.place = next;
        next += piece.size + 16;
    }
}

// Threads that an operator may use (set by octavo_set_num_threads).
int num_threads();

// Threads worth waking for `work` units when one thread is meant to get at least `grain` of them.
OCTAVO_INLINE int threads_for(int64_t work, int64_t grain) {
    int64_t useful = work / grain;
    int64_t limit = num_threads();
    return int(useful < 1 ? 1 : (useful < limit ? useful : limit));
}

using TaskFunction = void (*)(const void* context, int64_t task);

// function(context, task) over [0, count) on up to `threads` threads, the caller's included (threads.cpp).
void run_tasks(int threads, int64_t count, TaskFunction function, const void* context);

// body(task) over [0, count), each task taken by the next free thread; no other thread is woken when `threads` is 1.
template <class Body>
OCTAVO_INLINE void parallel_tasks(int threads, int64_t count, const Body& body) {
    if (threads <= 1 || count <= 1) {
        for (int64_t task = 0; task < count; ++task) body(task);
        return;
    }
    auto call = [](const void* context, int64_t task) { (*static_cast<const Body*>(context))(task); };
    run_tasks(threads, count, call, &body);
}

// body(begin, end) over [0, count) in `threads` contiguous, nearly equal parts.
template <class Body>
OCTAVO_INLINE void parallel_ranges(int threads, int64_t count, const Body& body) {
    if (threads <= 1 || count <= 1) {
        body(int64_t(0), count);
        return;
    }
    parallel_tasks(threads, threads, [&](int64_t t) { body(count * t / threads, count * (t + 1) / threads); });
}

}  // namespace octavo
