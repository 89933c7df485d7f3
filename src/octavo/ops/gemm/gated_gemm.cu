// Products of many rows with their activation on Hopper, of gates and ups or SQUARED: a kernel of
// octavo.ops.gemm.cluster_gemm, behind the texts of the ring and of the results, for weights as first lines, in one part.
//
// As many clusters as the processors hold walk over the tiles of out, transposed, in bands of BAND tiles of rows, so
// that what neighbours read stays in the L2. A tile's sums are rounded and held; their activation and their way to
// memory, by the copy engine, are between the first steps of the next tile, while the matrix unit works.

constexpr u32 SLICES = WIDTH / 32;               // of a tile's rows, one between two steps
constexpr u32 LINE_CHANNELS = GATED ? 32 : 64;   // of a row of a group's results
constexpr u32 LINE_BYTES = 2 * LINE_CHANNELS;    // as wide as the copy engine's swizzle
constexpr u32 ROOM_SLICES = GATED ? SLICES : SLICES / 2;  // of a group's results, that have room behind the ring at once
constexpr u32 ROOM_BYTES = ROOM_SLICES * 32 * LINE_BYTES;
static_assert(GATED != SQUARED && PARTS == 1, "sums are held as pairs of a warp's lower 8 lines and of its upper ones");
static_assert(WIDTH % 64 == 0 && ROOM_BYTES % 1024 == 0, "rooms are whole, and begin where a swizzle does");

// The tiles of a cluster.
struct Tiles {
    u32 first_clusters, second_clusters;
    __device__ static u32 cluster() { return blockIdx.x / (FIRST_SHARED * SECOND_SHARED); }
    __device__ static u32 clusters() { return gridDim.x / (FIRST_SHARED * SECOND_SHARED); }
    __device__ u32 turns() const {
        return (first_clusters * second_clusters - cluster() + clusters() - 1) / clusters();
    }
    __device__ Place at(u32 turn) const {
        Place place(1);
        u32 tile = cluster() + turn * clusters(), band = tile / (BAND * first_clusters);
        u32 left = second_clusters - band * BAND, rows = left - 1 < BAND ? left : BAND;  // none left: behind the last
        tile -= band * BAND * first_clusters;
        place.first_line = (tile / rows * SECOND_SHARED + place.first_rank) * FIRST_LINES;
        place.second_line = ((band * BAND + tile % rows) * FIRST_SHARED + place.second_rank) * SECOND_LINES;
        return place;
    }
};

// The producer's walk over their steps.
struct Turns {
    Tiles tiles;
    Place at;
    u32 turn;
    int step, steps;
    __device__ void advance() {
        if (++step == steps) step = 0, at = tiles.at(++turn);
    }
};

typedef u32 Held[WIDTH / 4];

// Where a group's results are on their way to `out`.
struct Writer {
    const TensorMap* out;
    u32 room, group;

    __device__ void meet() const { asm volatile("bar.sync %0, 128;" :: "r"(group + 1) : "memory"); }

    // A slice to the room, once the room is read; the room to memory, once it is full.
    __device__ void take(const Held& held, u32 slice, const Place& at) const {
        bool is_first = threadIdx.x % 128 == 0;
        u32 place = slice % ROOM_SLICES;
        if (place == 0) {
            if (is_first) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
            meet();
        }
        lay(held + 8 * slice, place * 32);
        if (place < ROOM_SLICES - 1) return;
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        meet();
        if (!is_first) return;
        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
                     :: "l"(out), "r"(at.first_line / (GATED ? 2 : 1) + (int)(group * LINE_CHANNELS)),
                        "r"(at.second_line + (int)((slice - place) * 32)), "r"(room) : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }

    // A warp's 8 or 16 channels of 32 rows, from `row` on in the room, swizzled as the copy engine wants them.
    __device__ void lay(const u32* pairs, u32 row) const {
        u32 warp = threadIdx.x / 32 % 4, results[4], others[4];
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            u32 lower = pairs[2 * i], upper = pairs[2 * i + 1];
            if (GATED) {
                results[i] = pack(activated(low(lower), low(upper)), activated(high(lower), high(upper)));
            } else {
                results[i] = squared(lower);
                others[i] = squared(upper);
            }
        }
        row += threadIdx.x % 32;
        u32 line = room + row * LINE_BYTES;
        if (GATED) {
            store_four<true>(line + (warp ^ row / 2 % 4) * 16, results[0], results[1], results[2], results[3]);
        } else {
            store_four<true>(line + (2 * warp ^ row % 8) * 16, results[0], results[1], results[2], results[3]);
            store_four<true>(line + ((2 * warp + 1) ^ row % 8) * 16, others[0], others[1], others[2], others[3]);
        }
    }
};

// A group's part of all tiles.
__device__ inline void consume_all(
    const Tiles& tiles, Reader& reader, const Writer& writer, u32 ring, u32 full, int steps) {
    Sums sums;
    Held held;
    u32 turns = tiles.turns();
    int left = turns * steps - STAGES;  // steps whose stages are filled again
    for (u32 turn = 0; turn < turns; ++turn) {
        int step = 0;
        clear(sums);
        if (turn) {
            Place before = tiles.at(turn - 1);
#pragma unroll
            for (; step < SLICES; ++step) {
                issue(sums, reader, writer.group, ring, full);
                writer.take(held, step, before);
                follow(reader, 0 < step && 0 < left--);
            }
        }
        for (; step < steps; ++step) {
            issue(sums, reader, writer.group, ring, full);
            follow(reader, 0 < step && 0 < left--);
        }
        finish(sums, reader, 0 < left--);
#pragma unroll
        for (u32 i = 0; i < WIDTH / 4; ++i) held[i] = pack(sums[0][2 * i], sums[0][2 * i + 1]);
    }
    Place last = tiles.at(turns - 1);
#pragma unroll
    for (u32 slice = 0; slice < SLICES; ++slice) writer.take(held, slice, last);
    if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// steps: K / 64, at least STAGES and SLICES. first_clusters, second_clusters: clusters along each side. out: the copy
// engine's view of [rows, channels].
extern "C" __global__ void __launch_bounds__(CONSUMERS + PRODUCERS, 1) gated_gemm(
    const __grid_constant__ TensorMap first, const __grid_constant__ TensorMap second,
    const __grid_constant__ TensorMap out, int steps, u32 first_clusters, u32 second_clusters) {
    extern __shared__ __align__(1024) unsigned char memory[];
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    u32 ring = (u32)__cvta_generic_to_shared(memory), rooms = ring + STAGES * STAGE_BYTES;
    u32 full = rooms + GROUPS * ROOM_BYTES, empty = full + 8 * STAGES;
    u32 group = threadIdx.x / 128;
    Tiles tiles = {first_clusters, second_clusters};
    begin(full, empty);
    if (group >= GROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == CONSUMERS)
            produce(&first, &second, Turns{tiles, tiles.at(0), 0, 0, steps}, ring, full, empty, tiles.turns() * steps);
        return;  // nothing reaches in later, see the other kernel
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(CONSUMER_REGISTERS));
    Reader reader(tiles.at(0), empty);
    consume_all(tiles, reader, {&out, rooms + group * ROOM_BYTES, group}, ring, full, steps);
}
