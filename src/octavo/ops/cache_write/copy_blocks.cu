// Blocks from memory that this GPU reaches, as another one's, into its own cache: by bulk copies through shared memory.
//
// One thread of a program orders all its copies, STAGES of CHUNK bytes under way at once: what waits for the link is
// not a register, so a few programs fill it and leave the processors to others. Addresses, strides and sizes are
// multiples of 16 bytes. Program p takes chunks p, p + programs, ...: of one part of one block each, the last one of a
// part perhaps shorter.

typedef unsigned long long u64;

struct Side {
    char* base;
    long long part, block;  // bytes from one part of a block to the next, and from one block to the next
};

struct Blocks {
    int own[BLOCKS], theirs[BLOCKS];
};

static __device__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

static __device__ void wait(unsigned barrier, unsigned phase) {
    unsigned done = 0;
    while (!done)
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done) : "r"(barrier), "r"(phase) : "memory");
}

extern "C" __global__ void __launch_bounds__(32) copy_blocks(
    Side own, Side theirs, long long part_bytes, int count, int parts, const __grid_constant__ Blocks blocks) {
    extern __shared__ __align__(128) char ring[];
    __shared__ u64 full[STAGES];
    if (threadIdx.x) return;
    for (int stage = 0; stage < STAGES; ++stage)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared_address(full + stage)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    const int chunks = static_cast<int>((part_bytes + CHUNK - 1) / CHUNK);
    const long long total = static_cast<long long>(count) * parts * chunks, step = gridDim.x;

    auto size_of = [&](long long index) {
        const long long left = part_bytes - index % chunks * CHUNK;
        return static_cast<unsigned>(left < CHUNK ? left : CHUNK);
    };
    auto place = [&](const Side& side, const int* numbers, long long index) {
        const long long piece = index / chunks;
        return side.base + piece / count * side.part + numbers[piece % count] * side.block + index % chunks * CHUNK;
    };
    auto load = [&](long long index, int stage) {
        const unsigned barrier = shared_address(full + stage), size = size_of(index);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(size) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     :: "r"(shared_address(ring + stage * CHUNK)), "l"(place(theirs, blocks.theirs, index)), "r"(size),
                        "r"(barrier) : "memory");
    };

    long long index = blockIdx.x;
    for (int stage = 0; stage < STAGES; ++stage)
        if (index + stage * step < total) load(index + stage * step, stage);
    int stage = 0, before = STAGES - 1;
    unsigned phase = 0;
    for (bool is_first = true; index < total; index += step, is_first = false) {
        wait(shared_address(full + stage), phase);
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                     :: "l"(place(own, blocks.own, index)), "r"(shared_address(ring + stage * CHUNK)), "r"(size_of(index))
                     : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        const long long next = index + (STAGES - 1) * step;  // into the room of the chunk before this one
        if (!is_first && next < total) {
            asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
            load(next, before);
        }
        before = stage;
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
