// Products of a few to hundreds of rows on Hopper: a kernel of octavo.ops.gemm.cluster_gemm, behind the texts of the
// ring and of the results. A block computes one tile of out, transposed, which takes the ring's place.

constexpr u32 OUT_CHANNELS = ROWS_FIRST ? SECOND_LINES : 64;  // of a group's results, gates and ups too
constexpr u32 OUT_ROWS = ROWS_FIRST ? 64 : SECOND_LINES;
constexpr u32 PITCH = OUT_CHANNELS * 2 + 16;     // bytes between rows of results: eight rows reach all banks
static_assert(GROUPS * OUT_ROWS * PITCH <= STAGES * STAGE_BYTES, "results take the ring's place");

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

constexpr u32 CHUNKS = OUT_CHANNELS / (GATED ? 16 : 8);         // of 8 channels, of a row that a group writes
constexpr u32 TURNS = (OUT_ROWS * CHUNKS + 127) / 128;          // of a thread, a chunk each
// What is added waits in registers where sums are few; else it is asked for when these are done: held, it would cost
// the multiplication more than it saves.
constexpr bool HELD = SECOND_LINES <= (ROWS_FIRST ? 64 : 96);

struct Chunk { u32 pairs[4]; };

__device__ inline Chunk load(u32 at) {
    Chunk c;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(c.pairs[0]), "=r"(c.pairs[1]), "=r"(c.pairs[2]), "=r"(c.pairs[3]) : "r"(at) : "memory");
    return c;
}

__device__ inline Chunk load(const unsigned short* from) {
    Chunk c;
    asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(c.pairs[0]), "=r"(c.pairs[1]), "=r"(c.pairs[2]), "=r"(c.pairs[3]) : "l"(from) : "memory");
    return c;
}

__device__ inline void store(unsigned short* to, const Chunk& c) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                 :: "l"(to), "r"(c.pairs[0]), "r"(c.pairs[1]), "r"(c.pairs[2]), "r"(c.pairs[3]) : "memory");
}

// Where a group's results go: in a matrix [rows, channels], from a row and a channel on.
struct Corner {
    int row, rows, channel, channels;
    __device__ bool has(u32 i) const {
        return row + (int)(i / CHUNKS) < rows && channel + 8 * (int)(i % CHUNKS) < channels;
    }
    __device__ u64 at(u32 i, u64 stride) const { return (row + i / CHUNKS) * stride + channel + 8 * (i % CHUNKS); }
};

// What is added to a thread's chunks, which a kernel ahead may have written. All are on their way at once.
__device__ inline void fetch(Chunk (&before)[TURNS], const unsigned short* residual, u64 stride, const Corner& corner) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
#pragma unroll
    for (u32 turn = 0; turn < TURNS; ++turn) {
        u32 i = turn * 128 + threadIdx.x % 128;
        if (corner.has(i)) before[turn] = load(residual + corner.at(i, stride));
    }
}

// The bits of a float32 sum that is rounded to 16 bits: for such numbers, of half as many bits less one, no second
// rounding moves the first.
__device__ inline u32 sum(u32 a, u32 b) {
    u32 both;
    if (HALF) asm("add.rn.f16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
    else asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
    return both;
}

// The group's results to out, 8 channels a thread at a time, with what is added to them, if anything is, or squared.
__device__ inline void write(
    u32 room, unsigned short* out, u64 stride, const Corner& corner, bool adds, const Chunk (&before)[TURNS]) {
    Chunk results[TURNS];
    u32 thread = threadIdx.x % 128;
#pragma unroll
    for (u32 turn = 0; turn < TURNS; ++turn) {
        u32 i = turn * 128 + thread;
        results[turn] = load(room + i / CHUNKS * PITCH + i % CHUNKS * 16);
    }
    if (adds) {
#pragma unroll
        for (u32 turn = 0; turn < TURNS; ++turn)
            for (u32 pair = 0; pair < 4; ++pair)
                results[turn].pairs[pair] = sum(results[turn].pairs[pair], before[turn].pairs[pair]);
    }
    if (SQUARED) {
#pragma unroll
        for (u32 turn = 0; turn < TURNS; ++turn)
            for (u32 pair = 0; pair < 4; ++pair) results[turn].pairs[pair] = squared(results[turn].pairs[pair]);
    }
#pragma unroll
    for (u32 turn = 0; turn < TURNS; ++turn)
        if (corner.has(turn * 128 + thread)) store(out + corner.at(turn * 128 + thread, stride), results[turn]);
}

// The activation of the group's gates, times the ups, to out.
__device__ inline void write_gated(u32 room, unsigned short* out, u64 stride, const Corner& corner) {
    for (u32 i = threadIdx.x % 128; i < OUT_ROWS * CHUNKS; i += 128) {
        if (!corner.has(i)) continue;
        u32 from = room + i / CHUNKS * PITCH + i % CHUNKS * 32;
        Chunk gate = load(from), up = load(from + 16);
        for (u32 pair = 0; pair < 4; ++pair)
            gate.pairs[pair] = pack(activated(low(gate.pairs[pair]), low(up.pairs[pair])),
                                    activated(high(gate.pairs[pair]), high(up.pairs[pair])));
        store(out + corner.at(i, stride), gate);
    }
}

// steps: K / 64. second_clusters: clusters along the second side. out [rows, channels], stride: elements between rows.
// residual: of out's shape, added to the rounded results, which are rounded again; null: nothing is. tile_rows: of a
// block; the tile may have room for more.
extern "C" __global__ void __launch_bounds__(CONSUMERS + PRODUCERS, 1) product(
    const __grid_constant__ TensorMap first, const __grid_constant__ TensorMap second, unsigned short* out, u64 stride,
    const unsigned short* residual, u64 residual_stride, int rows, int channels, int steps, int second_clusters,
    int tile_rows) {
    extern __shared__ __align__(1024) unsigned char memory[];
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    u32 ring = (u32)__cvta_generic_to_shared(memory), full = ring + STAGES * STAGE_BYTES, empty = full + 8 * STAGES;
    u32 warp = threadIdx.x / 32;
    Place at(second_clusters, tile_rows);
    begin(full, empty);
    if (warp >= GROUPS * 4) {
        if (CONSUMER_REGISTERS) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == CONSUMERS) produce(&first, &second, Walk{at, 0, steps, 0}, ring, full, empty, steps);
        return;  // nothing reaches in later: arrivals of other blocks were waited for, their copies are by consumers
    }
    if (CONSUMER_REGISTERS)
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(CONSUMER_REGISTERS ? CONSUMER_REGISTERS : 24));
    u32 group = warp / 4;
    int first_line = at.first_line + group * 64;
    int row = ROWS_FIRST ? first_line : at.second_line, line = ROWS_FIRST ? at.second_line : first_line;
    int end = min(rows, (ROWS_FIRST ? at.first_line : at.second_line) + tile_rows);
    Corner corner{row, end, GATED ? line / 2 : line, channels};
    bool adds = !GATED && !SQUARED && residual != nullptr;
    Chunk before[TURNS];
    if (HELD && adds) fetch(before, residual, residual_stride, corner);
    Sums sums;
    Reader reader(at, empty);
    consume(sums, reader, group, ring, full, steps, steps);
    asm volatile("bar.sync 1, %0;" :: "n"(CONSUMERS) : "memory");  // the ring is read: results take its place
    u32 room = ring + group * OUT_ROWS * PITCH;
    turn(sums, room, warp % 4);
    if (!HELD && adds) fetch(before, residual, residual_stride, corner);
    asm volatile("bar.sync %0, 128;" :: "r"(group + 2) : "memory");
    if (GATED) write_gated(room, out, stride, corner);
    else write(room, out, stride, corner, adds, before);
}
