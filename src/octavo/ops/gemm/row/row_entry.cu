// A drafter's entry and its first product on Hopper, of one row: the kernel of octavo.ops.gemm.row.row_entry, behind
// compile/lanes.cu, the matrix unit's `step` and row_norm.cu.
//
// A block has LINES channels. Their weights come through a ring of STAGES stages of PART k, laid out as row_product.cu
// has them, which is full before the token is there; the row is a token's embedding and a state, each normed by itself.
// Behind a draw the state is there before the block begins, and is normed before it waits; WHOLE: it is not.

struct Told {
    u64 table, first_norm, second_norm, weight, out, own;  // own: where the state goes, normed or as it is; 0: nowhere
    u64 ids, pick, states;                                 // pick: the place of both in theirs; 0: the first
    i64 states_row;
    float eps;
    u32 keeps_normed;
};

constexpr u32 SIZE = K / 2, PARTS = K / PART, PIECES = PART / 8;  // of 16 bytes, of a line in a stage
constexpr u32 STAGE = 2 * PART * LINES;                           // bytes
constexpr u32 ROW = 0, RING = 2 * K + 128;

__device__ inline i64 whole(u64 at) { return (i64)read8(at); }

// The weights of a part set out.
__device__ inline void ask(const Told& told, u32 ring, u32 part) {
    if (part < PARTS)
        for (u32 i = thread(); i < LINES * PIECES; i += 128) {
            u32 line = i / (8 * PIECES) * 8 + i % 8, piece = i / 8 % PIECES;
            u64 channel = block() * LINES + line;
            copy16(ring + part % STAGES * STAGE + 16 * i, told.weight + 2 * (channel * K + part * PART + 8 * piece), 16);
        }
    commit();
}

template <u32 PART_OF> __device__ inline void add_part(const Told& told, float (&sum)[LINES / 2], u32 base) {
    arrived<STAGES - 1>();  // of so many parts behind it, there or not
    begin_copies();
    together();
    u64 row = described(base + ROW + 2 * PART * PART_OF, 16, 0);
    u64 weights = described(base + RING + PART_OF % STAGES * STAGE, 128, 16 * PART);
    begin_steps(sum);
#pragma unroll
    for (u32 i = 0; i < PART / 16; ++i) step(sum, row + 2 * i, weights + 16 * i);
    end_steps(sum);
    if (PART_OF + STAGES < PARTS) together();
    ask(told, base + RING, PART_OF + STAGES);
    if constexpr (PART_OF + 1 < PARTS) add_part<PART_OF + 1>(told, sum, base);
}

extern "C" __global__ void __launch_bounds__(128) row_entry(const __grid_constant__ Told told) {
    if (!WHOLE) let_next_begin();
    const u32 lane = thread() % 32, warp = thread() / 32, base = (u32)__cvta_generic_to_shared(memory);
    for (u32 part = 0; part < STAGES; ++part) ask(told, base + RING, part);
    if (WHOLE) wait_for_before(), let_next_begin();
    i64 place = told.pick ? whole(told.pick) : 0;
    u64 state = told.states + 2 * place * told.states_row;
    norm_row<SIZE>(state, told.second_norm, told.eps, base + ROW + 2 * SIZE, lane, warp);
    if (!WHOLE) wait_for_before();
    u64 token = told.table + 2 * SIZE * whole(told.ids + 8 * place);
    norm_row<SIZE>(token, told.first_norm, told.eps, base + ROW, lane, warp);
    float sum[LINES / 2];
#pragma unroll
    for (u32 i = 0; i < LINES / 2; ++i) sum[i] = 0;
    add_part<0>(told, sum, base);
    if (told.own && !block())
        for (u32 i = thread(); i < SIZE / 8; i += 128)
            write(told.own + 16 * i, told.keeps_normed ? get4(base + ROW + 2 * SIZE + 16 * i) : read(state + 16 * i));
    if (thread() < 4)
#pragma unroll
        for (u32 i = 0; i < LINES / 8; ++i) {
            u32 two = pack(sum[4 * i], sum[4 * i + 1]);
            write4(told.out + 2 * (block() * LINES + 8 * i + 2 * lane), two);
        }
}
