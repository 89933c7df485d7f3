// Products of dozens to hundreds of rows on Hopper: the kernel of octavo.ops.gpu.cluster_product, which sets macros.
//
// A block computes one tile of out = x times weight, transposed: GROUPS * 64 lines of the matrix unit's first side by
// PARTS * WIDTH lines of its second. The weights are the first side, or with ROWS_FIRST the rows are. A producer thread
// lets the copy engine fill a ring of STAGES stages of 64 k; every group of four warps multiplies its 64 lines with all
// second ones. Blocks of a cluster share what they read: FIRST_SHARED blocks have the same first side, SECOND_SHARED
// the same second side, and each copies a part of it to all of them. The first stages' weights, which are constants,
// are asked for before the kernel ahead is done. An output is one float32 accumulator that walks k in ascending order
// in steps of 16, and is rounded once: no macro moves a bit.
//
// GATED: the weight is half gates, half their ups. Its copies lay 8 gates beside their 8 ups, and what is written is
// the gates' activation (TANH: gelu's, else silu) times the ups.
//
// Set too: HALF (float16, not bfloat16), CONSUMER_REGISTERS (0: as launched). Put ahead of this text: multiply(sums,
// first, second), one step of the matrix unit, 64 lines by WIDTH, into WIDTH / 2 sums of a thread.

typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(64) TensorMap { u64 words[16]; };

constexpr u32 DEPTH_BYTES = 128;                 // of a line of a stage: 64 k, as wide as the copy engine's swizzle
constexpr u32 STEPS_OF_STAGE = 4;                // of the matrix unit, 16 k each
constexpr u32 FIRST_LINES = GROUPS * 64;
constexpr u32 FIRST_BYTES = FIRST_LINES * DEPTH_BYTES;
constexpr u32 SECOND_LINES = PARTS * WIDTH;
constexpr u32 SECOND_BYTES = SECOND_LINES * DEPTH_BYTES;
constexpr u32 STAGE_BYTES = FIRST_BYTES + SECOND_BYTES;
constexpr u32 PEERS = FIRST_SHARED + SECOND_SHARED - 1;  // blocks that read what a block copies, itself too
constexpr bool CLUSTER = FIRST_SHARED * SECOND_SHARED > 1;
constexpr u32 CONSUMERS = GROUPS * 128;          // threads
constexpr u32 PRODUCERS = CONSUMER_REGISTERS ? 128 : 32;  // of which one works; registers move between groups
constexpr u32 OUT_CHANNELS = ROWS_FIRST ? SECOND_LINES : 64;  // of a group's results, gates and ups too
constexpr u32 OUT_ROWS = ROWS_FIRST ? 64 : SECOND_LINES;
constexpr u32 PITCH = OUT_CHANNELS * 2 + 16;     // bytes between rows of results: eight rows reach all banks
static_assert(GROUPS * OUT_ROWS * PITCH <= STAGES * STAGE_BYTES, "results take the ring's place");
static_assert(WIDTH % 16 == 0 && WIDTH <= 256, "results are written 16 lines at a time");
static_assert(SECOND_LINES % (8 * SECOND_SHARED) == 0, "what a block copies is whole");
static_assert(!(GATED && ROWS_FIRST), "gates and ups are first lines");

// Barriers and copies. Addresses are of shared memory, the block's own unless said.

__device__ inline void init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(count) : "memory");
}

__device__ inline void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

__device__ inline void wait(u32 barrier, u32 parity) {
    u32 done = 0;
    while (!done)
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
}

__device__ inline u32 in_block(u32 address, u32 rank) {  // the same place in another block of the cluster
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// Of any block of the cluster. What it tells is that a stage was read, so no write has to be seen first: with a release
// for the cluster's sake every arrival would wait for memory.
__device__ inline void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(barrier) : "memory");
}

__device__ inline void meet_cluster() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// A box of 64 k and some lines of a matrix, to this place in every block of the mask.
__device__ inline void copy_lines(const TensorMap* map, u32 to, u32 barrier, int k, int line, u32 mask) {
    if (mask & (mask - 1))
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
            " [%0], [%1, {%2, %3}], [%4], %5;"
            :: "r"(to), "l"(map), "r"(k), "r"(line), "r"(barrier), "h"((unsigned short)mask) : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
            " [%0], [%1, {%2, %3}], [%4];"
            :: "r"(to), "l"(map), "r"(k), "r"(line), "r"(barrier) : "memory");
}

// The same of gates and ups, seen as [channels / 8, 2, 8, K]: from a group of 8 gates and their ups on.
__device__ inline void copy_pairs(const TensorMap* map, u32 to, u32 barrier, int k, int group, u32 mask) {
    if (mask & (mask - 1))
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
            " [%0], [%1, {%2, %3, %3, %4}], [%5], %6;"
            :: "r"(to), "l"(map), "r"(k), "r"(0), "r"(group), "r"(barrier), "h"((unsigned short)mask) : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
            " [%0], [%1, {%2, %3, %3, %4}], [%5];"
            :: "r"(to), "l"(map), "r"(k), "r"(0), "r"(group), "r"(barrier) : "memory");
}

// Where a block is: its rank, its tiles, and who shares what with it.
struct Place {
    u32 first_rank, second_rank;    // of the tile in the cluster, along each side
    int first_line, second_line;    // of the tile in its matrix
    __device__ Place(u32 second_clusters) {
        constexpr u32 SIZE = FIRST_SHARED * SECOND_SHARED;
        u32 rank = blockIdx.x % SIZE, cluster = blockIdx.x / SIZE;
        first_rank = rank / FIRST_SHARED;
        second_rank = rank % FIRST_SHARED;
        first_line = (cluster / second_clusters * SECOND_SHARED + first_rank) * FIRST_LINES;
        second_line = (cluster % second_clusters * FIRST_SHARED + second_rank) * SECOND_LINES;
    }
    // Blocks of the same first, or second, side, and the rank of one of those that share either.
    __device__ u32 first_mask() const { return ((1u << FIRST_SHARED) - 1) << (first_rank * FIRST_SHARED); }
    __device__ u32 second_mask() const {
        u32 mask = 0;
        for (u32 other = 0; other < SECOND_SHARED; ++other) mask |= 1u << (other * FIRST_SHARED + second_rank);
        return mask;
    }
    __device__ u32 peer(u32 index) const {
        if (index < FIRST_SHARED) return first_rank * FIRST_SHARED + index;
        u32 other = index - FIRST_SHARED;
        return (other + (other >= first_rank)) * FIRST_SHARED + second_rank;
    }
};

// Ask for this block's part of a side of a step; every block that shares the side gets it.
__device__ inline void copy_first(const TensorMap* map, const Place& at, u32 stage, u32 full, int step) {
    constexpr u32 LINES = FIRST_LINES / FIRST_SHARED;
    u32 to = stage + at.second_rank * LINES * DEPTH_BYTES;
    int line = at.first_line + at.second_rank * LINES;
    if (GATED) copy_pairs(map, to, full, step * 64, line / 16, at.first_mask());
    else copy_lines(map, to, full, step * 64, line, at.first_mask());
}

__device__ inline void copy_second(const TensorMap* map, const Place& at, u32 stage, u32 full, int step) {
    constexpr u32 LINES = SECOND_LINES / SECOND_SHARED;
    u32 to = stage + FIRST_BYTES + at.first_rank * LINES * DEPTH_BYTES;
    copy_lines(map, to, full, step * 64, at.second_line + at.first_rank * LINES, at.second_mask());
}

// Fill the ring, of every step, once all who read what it held have told so.
__device__ void produce(
    const TensorMap* first, const TensorMap* second, const Place& at, u32 ring, u32 full, u32 empty, int steps) {
    int ahead = steps < STAGES ? steps : STAGES;
    for (int step = 0; step < ahead; ++step) {
        expect(full + 8 * step, STAGE_BYTES);
        if (ROWS_FIRST) copy_second(second, at, ring + step * STAGE_BYTES, full + 8 * step, step);
        else copy_first(first, at, ring + step * STAGE_BYTES, full + 8 * step, step);
    }
    asm volatile("prefetch.tensormap [%0];" :: "l"(ROWS_FIRST ? first : second) : "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    for (int step = 0; step < ahead; ++step) {
        if (ROWS_FIRST) copy_first(first, at, ring + step * STAGE_BYTES, full + 8 * step, step);
        else copy_second(second, at, ring + step * STAGE_BYTES, full + 8 * step, step);
    }
    u32 stage = 0, parity = 0;
    for (int step = ahead; step < steps; ++step) {
        u32 here = ring + stage * STAGE_BYTES;
        wait(empty + 8 * stage, parity);
        expect(full + 8 * stage, STAGE_BYTES);
        copy_first(first, at, here, full + 8 * stage, step);
        copy_second(second, at, here, full + 8 * stage, step);
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
}

// What the matrix unit is told of a tile: its place, 1,024 bytes between 8 lines, swizzled by 128.
__device__ inline u64 describe(u32 address) {
    return (u64)(address >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

typedef float Sums[PARTS][WIDTH / 2];

__device__ inline void fence(Sums& sums) {  // sums change behind the compiler's back
#pragma unroll
    for (u32 i = 0; i < PARTS * WIDTH / 2; ++i)
        asm volatile("" : "+f"(sums[i / (WIDTH / 2)][i % (WIDTH / 2)]) :: "memory");
}

// A group's sums. A stage is given back once the step after it is on its way, if it is filled again.
__device__ inline void consume(
    Sums& sums, const Place& at, u32 group, u32 ring, u32 full, u32 empty, int steps) {
    u32 lane = threadIdx.x % 32;
    u32 released = CLUSTER ? in_block(empty, at.peer(lane < PEERS ? lane : 0)) : empty;
    u32 stage = 0, parity = 0, last = 0;
#pragma unroll
    for (u32 i = 0; i < PARTS * WIDTH / 2; ++i) sums[i / (WIDTH / 2)][i % (WIDTH / 2)] = 0.0f;
    for (int step = 0; step < steps; ++step) {
        wait(full + 8 * stage, parity);
        u64 first = describe(ring + stage * STAGE_BYTES + group * 64 * DEPTH_BYTES);
        u64 second = describe(ring + stage * STAGE_BYTES + FIRST_BYTES);
        fence(sums);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (u32 k = 0; k < STEPS_OF_STAGE; ++k)
#pragma unroll
            for (u32 part = 0; part < PARTS; ++part)
                multiply(sums[part], first + 2 * k, second + 2 * k + part * (WIDTH * DEPTH_BYTES >> 4));
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        fence(sums);
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (0 < step && step <= steps - STAGES && lane < PEERS) arrive(released + 8 * last);
        last = stage;
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    fence(sums);
}

// Results.

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

// The arithmetic of octavo.ops.gpu.activation, with the instructions that Triton makes of it.
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

// A warp's sums, as 16-bit results, to the group's [OUT_ROWS, OUT_CHANNELS] in shared memory.
__device__ inline void turn(const Sums& sums, u32 room, u32 warp) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 part = 0; part < PARTS; ++part) {
#pragma unroll
        for (u32 j = 0; j < WIDTH / 8; j += 2) {
            const float* s = sums[part] + 4 * j;
            u32 block = part * (WIDTH / 8) + j;  // of 8 second lines
            u32 a = pack(s[0], s[1]), b = pack(s[2], s[3]), c = pack(s[4], s[5]), d = pack(s[6], s[7]);
            u32 row = ROWS_FIRST ? warp * 16 + lane % 16 : 8 * (block + lane / 16) + lane % 8;
            u32 chunk = ROWS_FIRST ? block + lane / 16 : warp * 2 + lane / 8 % 2;  // of 8 channels
            store_four<!ROWS_FIRST>(room + row * PITCH + chunk * 16, a, b, c, d);
        }
    }
}

struct Chunk { u32 pairs[4]; };  // of 8 channels

__device__ inline Chunk load(u32 at) {
    Chunk c;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(c.pairs[0]), "=r"(c.pairs[1]), "=r"(c.pairs[2]), "=r"(c.pairs[3]) : "r"(at) : "memory");
    return c;
}

__device__ inline void store(unsigned short* to, const Chunk& c) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                 :: "l"(to), "r"(c.pairs[0]), "r"(c.pairs[1]), "r"(c.pairs[2]), "r"(c.pairs[3]) : "memory");
}

// The group's results to out, 8 channels a thread at a time.
__device__ inline void write(u32 room, unsigned short* out, u64 stride, int row, int rows, int channel, int channels) {
    constexpr u32 CHUNKS = OUT_CHANNELS / (GATED ? 16 : 8);
    for (u32 i = threadIdx.x % 128; i < OUT_ROWS * CHUNKS; i += 128) {
        u32 r = i / CHUNKS, chunk = i % CHUNKS;
        if (row + (int)r >= rows || channel + 8 * (int)chunk >= channels) continue;
        Chunk result = load(room + r * PITCH + chunk * (GATED ? 32 : 16));
        if (GATED) {
            Chunk up = load(room + r * PITCH + chunk * 32 + 16);
            for (u32 pair = 0; pair < 4; ++pair)
                result.pairs[pair] = pack(activated(low(result.pairs[pair]), low(up.pairs[pair])),
                                          activated(high(result.pairs[pair]), high(up.pairs[pair])));
        }
        store(out + (row + r) * stride + channel + 8 * chunk, result);
    }
}

// steps: K / 64. second_clusters: clusters along the second side. out [rows, channels], stride: elements between rows.
extern "C" __global__ void __launch_bounds__(CONSUMERS + PRODUCERS, 1) product(
    const __grid_constant__ TensorMap first, const __grid_constant__ TensorMap second, unsigned short* out, u64 stride,
    int rows, int channels, int steps, int second_clusters) {
    extern __shared__ __align__(1024) unsigned char memory[];
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    u32 ring = (u32)__cvta_generic_to_shared(memory), full = ring + STAGES * STAGE_BYTES, empty = full + 8 * STAGES;
    u32 warp = threadIdx.x / 32;
    Place at(second_clusters);
    if (threadIdx.x == CONSUMERS) {
        for (u32 stage = 0; stage < STAGES; ++stage) {
            init(full + 8 * stage, 1);
            init(empty + 8 * stage, GROUPS * 4 * PEERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (CLUSTER) meet_cluster();
    else __syncthreads();
    if (warp >= GROUPS * 4) {
        if (CONSUMER_REGISTERS) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == CONSUMERS) produce(&first, &second, at, ring, full, empty, steps);
        return;  // nothing reaches in later: arrivals of other blocks were waited for, their copies are by consumers
    }
    if (CONSUMER_REGISTERS)
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(CONSUMER_REGISTERS ? CONSUMER_REGISTERS : 24));
    u32 group = warp / 4;
    Sums sums;
    consume(sums, at, group, ring, full, empty, steps);
    asm volatile("bar.sync 1, %0;" :: "n"(CONSUMERS) : "memory");  // the ring is read: results take its place
    u32 room = ring + group * OUT_ROWS * PITCH;
    turn(sums, room, warp % 4);
    asm volatile("bar.sync %0, 128;" :: "r"(group + 2) : "memory");
    int first_line = at.first_line + group * 64;
    int row = ROWS_FIRST ? first_line : at.second_line, line = ROWS_FIRST ? at.second_line : first_line;
    write(room, out, stride, row, rows, GATED ? line / 2 : line, channels);
}
