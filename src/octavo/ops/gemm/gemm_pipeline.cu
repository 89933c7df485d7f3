// The ring of octavo.ops.gemm's products for Hopper in CUDA C++, put ahead of a kernel's own text. Macros are set.
//
// A block computes tiles of x times weight: GROUPS * 64 lines of the matrix unit's first side by PARTS * WIDTH lines of
// its second. The weights are the first side, or with ROWS_FIRST the rows are. A producer thread lets the copy engine
// fill a ring of STAGES stages of 64 k; every group of four warps multiplies its 64 lines with all second ones. Blocks
// of a cluster share what they read: FIRST_SHARED blocks have the same first side, SECOND_SHARED the same second side,
// and each copies a part of it to all of them. The first stages' weights, which are constants, are asked for before the
// kernel ahead is done. A sum is one float32 accumulator that walks k in ascending order in steps of 16: no macro moves
// a bit.
//
// GATED: the weight is half gates, half their ups. Its copies lay 8 gates beside their 8 ups.
//
// Set too: CONSUMER_REGISTERS (0: as launched). Put ahead of this text: multiply(sums, first, second), one step of the
// matrix unit, 64 lines by WIDTH, into WIDTH / 2 sums of a thread.

typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(64) TensorMap { u64 words[16]; };

constexpr u32 DEPTH_BYTES = 128;                 // of a line of a stage: 64 k, as wide as the copy engine's swizzle
constexpr u32 STEPS_OF_STAGE = 4;                // of the matrix unit, 16 k each
constexpr u32 FIRST_LINES = GROUPS * 64;
constexpr u32 FIRST_BYTES = FIRST_LINES * DEPTH_BYTES;
constexpr u32 SECOND_LINES = PARTS * WIDTH;
constexpr u32 SECOND_BYTES = SECOND_LINES * DEPTH_BYTES;
constexpr int TILE_ROWS = ROWS_FIRST ? FIRST_LINES : SECOND_LINES;
constexpr u32 STAGE_BYTES = FIRST_BYTES + SECOND_BYTES;
constexpr u32 PEERS = FIRST_SHARED + SECOND_SHARED - 1;  // blocks that read what a block copies, itself too
constexpr bool CLUSTER = FIRST_SHARED * SECOND_SHARED > 1;
constexpr u32 CONSUMERS = GROUPS * 128;          // threads
constexpr u32 PRODUCERS = CONSUMER_REGISTERS ? 128 : 32;  // of which one works; registers move between groups
static_assert(WIDTH % 16 == 0 && WIDTH <= 256, "the matrix unit's second side");
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
    int rows;                       // of a tile, that are copied: lines beyond hold anything, as do their sums
    __device__ Place(u32 second_clusters, int rows = TILE_ROWS) : rows(rows) {
        constexpr u32 SIZE = FIRST_SHARED * SECOND_SHARED;
        u32 rank = blockIdx.x % SIZE, cluster = blockIdx.x / SIZE;
        first_rank = rank / FIRST_SHARED;
        second_rank = rank % FIRST_SHARED;
        first_line = (cluster / second_clusters * SECOND_SHARED + first_rank) * first_lines();
        second_line = (cluster % second_clusters * FIRST_SHARED + second_rank) * second_lines();
    }
    __device__ int first_lines() const { return ROWS_FIRST ? rows : FIRST_LINES; }
    __device__ int second_lines() const { return ROWS_FIRST ? SECOND_LINES : rows; }
    __device__ u32 stage_bytes() const { return (first_lines() + second_lines()) * DEPTH_BYTES; }
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
    u32 lines = at.first_lines() / FIRST_SHARED, to = stage + at.second_rank * lines * DEPTH_BYTES;
    int line = at.first_line + at.second_rank * lines;
    if (GATED) copy_pairs(map, to, full, step * 64, line / 16, at.first_mask());
    else copy_lines(map, to, full, step * 64, line, at.first_mask());
}

__device__ inline void copy_second(const TensorMap* map, const Place& at, u32 stage, u32 full, int step) {
    u32 lines = at.second_lines() / SECOND_SHARED, to = stage + FIRST_BYTES + at.first_rank * lines * DEPTH_BYTES;
    copy_lines(map, to, full, step * 64, at.second_line + at.first_rank * lines, at.second_mask());
}

// The steps of a block: of a tile, then of the next, whose second side is `stride` lines on.
struct Walk {
    Place at;
    int step, steps, stride;
    __device__ void advance() {
        if (++step == steps) step = 0, at.second_line += stride;
    }
};

// Fill the ring, of `total` steps of a walk, once all who read what it held have told so.
template <class Steps>
__device__ void produce(
    const TensorMap* first, const TensorMap* second, Steps walk, u32 ring, u32 full, u32 empty, int total) {
    int ahead = total < STAGES ? total : STAGES;
    Steps begin = walk;
    for (int index = 0; index < ahead; ++index, walk.advance()) {
        u32 here = ring + index * STAGE_BYTES;
        expect(full + 8 * index, walk.at.stage_bytes());
        if (ROWS_FIRST) copy_second(second, walk.at, here, full + 8 * index, walk.step);
        else copy_first(first, walk.at, here, full + 8 * index, walk.step);
    }
    asm volatile("prefetch.tensormap [%0];" :: "l"(ROWS_FIRST ? first : second) : "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    walk = begin;
    for (int index = 0; index < ahead; ++index, walk.advance()) {
        u32 here = ring + index * STAGE_BYTES;
        if (ROWS_FIRST) copy_first(first, walk.at, here, full + 8 * index, walk.step);
        else copy_second(second, walk.at, here, full + 8 * index, walk.step);
    }
    u32 stage = 0, parity = 0;
    for (int index = ahead; index < total; ++index, walk.advance()) {
        u32 here = ring + stage * STAGE_BYTES;
        wait(empty + 8 * stage, parity);
        expect(full + 8 * stage, walk.at.stage_bytes());
        copy_first(first, walk.at, here, full + 8 * stage, walk.step);
        copy_second(second, walk.at, here, full + 8 * stage, walk.step);
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

// Where a group is in the ring, and whom it tells that it has read a stage.
struct Reader {
    u32 stage, parity, before, released;
    __device__ Reader(const Place& at, u32 empty) : stage(0), parity(0), before(0), released(empty) {
        u32 lane = threadIdx.x % 32;
        if (CLUSTER) released = in_block(empty, at.peer(lane < PEERS ? lane : 0));
    }
    __device__ void pass() {
        before = stage;
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    __device__ void give_back() const {
        if (threadIdx.x % 32 < PEERS) arrive(released + 8 * before);
    }
};

__device__ inline void clear(Sums& sums) {
#pragma unroll
    for (u32 i = 0; i < PARTS * WIDTH / 2; ++i) sums[i / (WIDTH / 2)][i % (WIDTH / 2)] = 0.0f;
    fence(sums);  // else the compiler makes steps wait for each other
}

// The reader's step is on its way.
__device__ inline void issue(Sums& sums, const Reader& reader, u32 group, u32 ring, u32 full) {
    wait(full + 8 * reader.stage, reader.parity);
    u64 first = describe(ring + reader.stage * STAGE_BYTES + group * 64 * DEPTH_BYTES);
    u64 second = describe(ring + reader.stage * STAGE_BYTES + FIRST_BYTES);
    fence(sums);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (u32 k = 0; k < STEPS_OF_STAGE; ++k)
#pragma unroll
        for (u32 part = 0; part < PARTS; ++part)
            multiply(sums[part], first + 2 * k, second + 2 * k + part * (WIDTH * DEPTH_BYTES >> 4));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    fence(sums);
}

// The step before the reader's is done: its stage is given back if it is filled again.
__device__ inline void follow(Reader& reader, bool is_filled_again) {
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    if (is_filled_again) reader.give_back();
    reader.pass();
}

// The last step of a tile is done.
__device__ inline void finish(Sums& sums, const Reader& reader, bool is_filled_again) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    fence(sums);
    if (is_filled_again) reader.give_back();
}

// A group's sums of a tile. left: the block's steps from here on; stages of the last STAGES are not filled again.
__device__ inline void consume(Sums& sums, Reader& reader, u32 group, u32 ring, u32 full, int steps, int left) {
    clear(sums);
    for (int step = 0; step < steps; ++step) {
        issue(sums, reader, group, ring, full);
        follow(reader, 0 < step && step <= left - STAGES);
    }
    finish(sums, reader, steps <= left - STAGES);
}

// Ready the barriers, before anything else; all threads, and all of the cluster's.
__device__ inline void begin(u32 full, u32 empty) {
    if (threadIdx.x == CONSUMERS) {
        for (u32 stage = 0; stage < STAGES; ++stage) {
            init(full + 8 * stage, 1);
            init(empty + 8 * stage, GROUPS * 4 * PEERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (CLUSTER) meet_cluster();
    else __syncthreads();
}
