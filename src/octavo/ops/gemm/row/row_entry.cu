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

// The weights of a part set out: 16 pieces of 8 lines at a time. own: a thread's first place in the weight.
__device__ inline void ask(u64 own, u32 ring, u32 part) {
    static_assert(PIECES % 16 == 0, "a thread has whole turns");
    if (part < PARTS)
#pragma unroll
        for (u32 turn = 0; turn < LINES * PIECES / 128; ++turn) {
            u32 group = turn / (PIECES / 16), piece = turn % (PIECES / 16) * 16;
            copy16(ring + part % STAGES * STAGE + 16 * (thread() + 128 * turn),
                   own + 2 * (part * PART + 8 * group * K + 8 * piece), 16);
        }
    commit();
}

// What is there of the ring before the row is waits for it; what fills it again is waited for by itself.
template <u32 NUMBER> __device__ inline void add_part(float (&sum)[LINES / 2], u64 own, u32 base) {
    if (NUMBER == 0 || NUMBER >= STAGES) {
        if constexpr (NUMBER == 0)
            arrived<0>();
        else
            arrived<STAGES - 1>();  // of so many parts asked for behind it, there or not
        begin_copies();
        together();
    }
    u64 row = described(base + ROW + 2 * PART * NUMBER, 16, 0);
    u64 weights = described(base + RING + NUMBER % STAGES * STAGE, 128, 16 * PART);
    begin_steps(sum);
#pragma unroll
    for (u32 i = 0; i < PART / 16; ++i) step(sum, row + 2 * i, weights + 16 * i);
    end_steps(sum);
    if (NUMBER + STAGES < PARTS) together();
    ask(own, base + RING, NUMBER + STAGES);
    if constexpr (NUMBER + 1 < PARTS) add_part<NUMBER + 1>(sum, own, base);
}

extern "C" __global__ void __launch_bounds__(128) row_entry(const __grid_constant__ Told told) {
    if (!WHOLE) let_next_begin();
    const u32 lane = thread() % 32, warp = thread() / 32, base = (u32)__cvta_generic_to_shared(memory);
    const u64 own = told.weight + 2 * ((u64)(block() * LINES + thread() % 8) * K + thread() / 8 * 8);
#pragma unroll
    for (u32 part = 0; part < STAGES; ++part) ask(own, base + RING, part);
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
    add_part<0>(sum, own, base);
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
