// out = x @ weight.T + bias for packed weights (panels.h), and the gather of their rows.
//
// Few rows (at most one register tile): weights are streamed once, widened in registers. More rows: rows are copied
// into tiles of blocks, a block of each panel is widened to float32 once, and tiles run over it, partial chains resting in
// float32 between blocks of k. Invariant: both walk the chain of panels.h, so a row's bits know neither path nor tile.
// bfloat16 rows of a weight of pairs are multiplied as they are, step by step; nothing is widened. float32 rows of one
// walk the chain of single k, always as many rows do.
#include "include/operators.h"
#include "include/panels.h"

namespace octavo {

struct Call {
    const Weight* weight;
    const float* bias;  // null: none
    void* out;
    int64_t out_stride;
    int32_t out_dtype;
    bool pairs;  // a step is a pair of k, and rows of x are words

    int64_t steps() const { return pairs ? (weight->k + 1) / 2 : weight->k; }
};

// ---- rows in, rows out -------------------------------------------------------------------------------------------

// Floats of `rows` rows of x as blocks: [ceil(k / KC)][rows][ROW], so that a row of a block is at a constant distance
// from the next.
static int64_t blocked_size(int64_t rows, int64_t steps) { return (steps + KC - 1) / KC * rows * ROW; }

template <class T>
static void block_rows(const T* x, int64_t stride, int64_t k, int64_t rows, float* a) {
    for (int64_t k0 = 0; k0 < k; k0 += KC, a += rows * ROW) {
        const int64_t count = k0 + KC < k ? KC : k - k0, whole = count / VL * VL;
        for (int64_t m = 0; m < rows; ++m) {
            const T* from = x + m * stride + k0;
            float* to = a + m * ROW;
            for (int64_t i = 0; i < whole; i += VL) store(to + i, load(from + i));
            for (int64_t i = whole; i < count; ++i) to[i] = to_float(from[i]);
        }
    }
}

// The same of words; a last one that is half a pair gets a zero.
static void block_pairs(const bf16* x, int64_t stride, int64_t k, int64_t rows, float* a) {
    for (int64_t k0 = 0; k0 < k; k0 += 2 * KC, a += rows * ROW) {
        const int64_t count = k0 + 2 * KC < k ? 2 * KC : k - k0;
        for (int64_t m = 0; m < rows; ++m) {
            char* to = reinterpret_cast<char*>(a + m * ROW);
            std::memcpy(to, x + m * stride + k0, count * sizeof(bf16));
            if (count % 2) std::memset(to + count * sizeof(bf16), 0, sizeof(bf16));
        }
    }
}

static void block_rows(const Call& call, const void* x, int64_t stride, int32_t dtype, int64_t row, int64_t rows,
                       float* a) {
    const int64_t k = call.weight->k;
    if (call.pairs) block_pairs(static_cast<const bf16*>(x) + row * stride, stride, k, rows, a);
    else if (dtype == F32) block_rows(static_cast<const float*>(x) + row * stride, stride, k, rows, a);
    else block_rows(static_cast<const bf16*>(x) + row * stride, stride, k, rows, a);
}

template <class T>
static OCTAVO_INLINE void finish_vector(const Call& call, int64_t row, int64_t n, vf acc) {
    T* out = static_cast<T*>(call.out) + row * call.out_stride + n;
    int64_t left = call.weight->n - n;
    if (left >= VL) {
        store(out, call.bias ? acc + load(call.bias + n) : acc);
    } else if (left > 0) {
        store_first(out, call.bias ? acc + load_first(call.bias + n, left) : acc, left);
    }
}

// Bias, rounding and the store of row `row`, strip `strip` of `panel`.
static OCTAVO_INLINE void finish(const Call& call, int64_t row, int64_t panel, int strip, const vf (&acc)[2]) {
    int64_t n = panel * NR + strip * VL;
    for (int half = 0; half < 2; ++half) {
        if (call.out_dtype == F32) finish_vector<float>(call, row, n + half * 16, acc[half]);
        else finish_vector<bf16>(call, row, n + half * 16, acc[half]);
    }
}

// ---- few rows: stream the packed weight ----------------------------------------------------------------------------

// Strips walked together: enough independent chains to hide the latency, few enough for the registers and the memory.
template <class P, int MR>
constexpr int strips_together() {
    if (P::TOGETHER != 0) return P::TOGETHER * STRIPS < 4 ? P::TOGETHER * STRIPS : 4;
    constexpr int most = P::GROUP != 0 && MAX_TILE < 12 ? 2 : 4;  // scales take registers too
    constexpr int fit = MAX_TILE / MR;
    return fit >= 4 ? most : (fit >= 2 ? 2 : 1);
}

// Rows of x as blocks: from one block to the next are `block` floats, KC where x itself is the one row.
struct Few {
    const float* rows;
    int64_t block;
};

// Rows [0, MR) times strips [unit, unit + U), a unit being (panel, strip).
template <class P, int MR, int U>
static void stream_units(const Call& call, const Few& x, int64_t unit) {
    const Weight& weight = *call.weight;
    Walk<U> walk;
    for (int u = 0; u < U; ++u) {
        walk.rows[u] = weight.data + (unit + u) / STRIPS * weight.panel_bytes;
        walk.strips[u] = int((unit + u) % STRIPS);
    }
    vf acc[MR][U][2] = {};
    const float* a = x.rows;
    const int64_t steps = call.steps();
    for (int64_t k = 0; k < steps; k += KC, a += x.block) {
        chain<P, MR, U, Fetch::SELF>(a, walk, steps - k < KC ? steps - k : KC, acc);
        for (int u = 0; u < U; ++u) walk.rows[u] += P::panel_bytes(KC);
    }
    for (int m = 0; m < MR; ++m)
        for (int u = 0; u < U; ++u) finish(call, m, (unit + u) / STRIPS, walk.strips[u], acc[m][u]);
}

template <class P, int MR>
static void stream_range(const Call& call, const Few& x, int64_t begin, int64_t end) {
    constexpr int U = strips_together<P, MR>();
    int64_t unit = begin * STRIPS, last = end * STRIPS;
    for (; unit + U <= last; unit += U) stream_units<P, MR, U>(call, x, unit);
    for (; unit < last; ++unit) stream_units<P, MR, 1>(call, x, unit);
}

using StreamRange = void (*)(const Call&, const Few&, int64_t, int64_t);

template <class P, int MR>
static StreamRange stream_for(int rows) {
    if (rows == MR) return stream_range<P, MR>;
    if constexpr (MR > 1) return stream_for<P, MR - 1>(rows);
    return nullptr;
}

// Bytes from which on a weight counts as coming from memory: beside all others of its model it stays in no L2.
constexpr int64_t FROM_MEMORY = 2 << 20;
constexpr int MAX_STREAMED = 6;  // rows that wait for the memory, and not for their arithmetic, with pairs

static StreamRange stream_for(const Weight& weight, int rows) {
    const int32_t kind = weight.kind;
    const bool from_memory = weight.n * weight.panel_bytes / NR >= FROM_MEMORY;
    if (rows == 1 && from_memory) {
        if (kind == KIND_F32) return stream_range<F32Stream, 1>;
        if (kind == KIND_BF16) return stream_range<Bf16Stream, 1>;
    }
    if (rows <= MAX_STREAMED && from_memory && kind == KIND_PAIRS) return stream_for<PairStream, MAX_STREAMED>(rows);
    if (kind == KIND_F32) return stream_for<F32Panel, MAX_TILE>(rows);
    if (kind == KIND_BF16) return stream_for<Bf16Panel, MAX_TILE>(rows);
    if (kind == KIND_PAIRS) return stream_for<PairPanel, MAX_TILE>(rows);
    return stream_for<Int8Panel, MAX_TILE>(rows);
}

static void few_row_tile(const Call& call, const void* x, int64_t stride, int32_t dtype, int rows) {
    const Weight& weight = *call.weight;
    Few few{static_cast<const float*>(x), KC};
    if (rows > 1 || (call.pairs ? weight.k % 2 != 0 : dtype != F32)) {
        static thread_local Scratch scratch;
        float* blocks = scratch.floats(blocked_size(rows, call.steps()));
        block_rows(call, x, stride, dtype, 0, rows, blocks);
        few = {blocks, rows * int64_t(ROW)};
    }
    StreamRange run = stream_for(weight, rows);
    int64_t panels = (weight.n + NR - 1) / NR;
    int threads = threads_for(weight.n * weight.k * (rows + 1) / 2, 40000);
    // Shares of about 128 KiB, equally many for each thread: one that is held up leaves its rest to the others.
    int64_t even = (panels + threads - 1) / threads;
    int64_t rounds = 1 + even * weight.panel_bytes / 131072;
    int64_t share = (even + rounds - 1) / rounds;
    if (threads > 1 && share < even) share = (share + 3) / 4 * 4;
    parallel_tasks(threads, (panels + share - 1) / share, [&](int64_t task) {
        int64_t begin = task * share, end = begin + share;
        run(call, few, begin, end < panels ? end : panels);
    });
}

// ---- many rows: widen a block of a panel once, run row tiles over it -------------------------------------------------

constexpr int64_t BLOCK_ROWS = 192;  // rows whose block of k stays in L2 (192 KiB)
constexpr int64_t CHUNK_ROWS = 768;  // rows packed at a time: bounds the scratch
constexpr int64_t GROUP_PANELS = 8;  // panels of a task: their partial chains are 192 KiB

// [k_begin, k_end) of a panel as float32 rows of 32; k_begin is a multiple of QGROUP.
template <class P>
static void widen(const char* panel, int64_t k_begin, int64_t k_end, float* out) {
    for (int64_t k = k_begin; k < k_end;) {
        vf scales[STRIPS][2] = {};
        int64_t stop = k_end;
        const char* row = panel + k * P::ROW_BYTES;
        if constexpr (P::GROUP != 0) {
            const char* group = panel + k / P::GROUP * P::GROUP_BYTES;
            for (int s = 0; s < STRIPS; ++s) P::scales(group, s, scales[s]);
            row = group + P::SCALE_BYTES;
            stop = k + P::GROUP < k_end ? k + P::GROUP : k_end;
        }
        for (; k < stop; ++k, row += P::ROW_BYTES, out += NR) {
            OCTAVO_UNROLL for (int s = 0; s < STRIPS; ++s) {
                vf w[2];
                P::weights(row, s, scales[s], w);
                store(out + s * VL, w[0]);
                store(out + s * VL + 16, w[1]);
            }
        }
    }
}

// The same of pairs; k_begin is even.
static void widen_pairs(const char* panel, int64_t k_begin, int64_t k_end, float* out) {
    for (int64_t k = k_begin; k < k_end; k += 2, out += 2 * NR) {
        const char* words = panel + k / 2 * PairPanel::ROW_BYTES;
        for (int c = 0; c < NR; c += VL) {
            vf pair = load_bits<vf>(words + 4 * c);
            store(out + c, low_halves(pair));
            if (k + 1 < k_end) store(out + NR + c, high_halves(pair));
        }
    }
}

// One block of k of one panel: from zero or from partial chains, to partial chains or to the output.
struct Block {
    const char* weights;  // [count][32] floats or words
    int64_t count, panel;
    bool first, last;
    const char* ahead;  // the packed block to fetch meanwhile
    int64_t ahead_stride;
};

// MR rows (a: a block's, the first being `row` of the output) times a block of weights; partial: [MR][32].
template <class P, int MR, Fetch FETCH>
static void tile(const Call& call, const Block& block, const float* a, float* partial, int64_t row) {
    for (int strip = 0; strip < STRIPS; ++strip) {
        vf acc[MR][1][2] = {};
        float* rest = partial + strip * VL;
        if (!block.first) {
            for (int m = 0; m < MR; ++m)
                for (int half = 0; half < 2; ++half) acc[m][0][half] = load(rest + m * NR + half * 16);
        }
        Walk<1> walk{{block.weights}, {strip}, block.ahead, block.ahead_stride};
        chain<P, MR, 1, FETCH>(a, walk, block.count, acc);
        for (int m = 0; m < MR; ++m) {
            if (block.last) {
                finish(call, row + m, block.panel, strip, acc[m][0]);
            } else {
                for (int half = 0; half < 2; ++half) store(rest + m * NR + half * 16, acc[m][0][half]);
            }
        }
    }
}

using Tile = void (*)(const Call&, const Block&, const float*, float*, int64_t);

template <class P, Fetch FETCH, int MR = MAX_TILE>
static Tile tile_for(int rows) {
    if (rows == MR) return tile<P, MR, FETCH>;
    if constexpr (MR > 1) return tile_for<P, FETCH, MR - 1>(rows);
    return nullptr;
}

template <class P>
static Tile tile_for(int rows, bool is_first) {
    return is_first ? tile_for<P, Fetch::BLOCK>(rows) : tile_for<P, Fetch::NOTHING>(rows);
}

// Rows of a chunk cut into tiles of nearly equal height: the first `taller` have one row more.
struct Tiling {
    int64_t tiles, height, taller;

    explicit Tiling(int64_t rows) : tiles((rows + MAX_TILE - 1) / MAX_TILE) {
        height = rows / tiles;
        taller = rows % tiles;
    }
    int64_t row(int64_t t) const { return t * height + (t < taller ? t : taller); }
};

// Tiles [tile_begin, tile_end) times panels [panel_begin, panel_end); a is the packed chunk that starts at `row0`.
static void many_rows_task(const Call& call, const float* a, int64_t row0, const Tiling& tiling, int64_t tile_begin,
                           int64_t tile_end, int64_t panel_begin, int64_t panel_end) {
    static thread_local Scratch block_scratch, partial_scratch;
    const Weight& weight = *call.weight;
    const int64_t first_row = tiling.row(tile_begin), rows = tiling.row(tile_end) - first_row, k = call.steps();
    const int64_t blocked = blocked_size(1, k);
    float* widened = block_scratch.floats(KC * NR);
    float* partials = partial_scratch.floats((panel_end - panel_begin) * rows * NR);
    for (int64_t k0 = 0; k0 < k; k0 += KC) {
        const int64_t k1 = k0 + KC < k ? k0 + KC : k;
        for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
            const char* packed = weight.data + panel * weight.panel_bytes;
            const int64_t stride = weight.panel_bytes / k;
            const char* ahead = panel + 1 < panel_end ? packed + weight.panel_bytes + k0 * stride
                                                      : weight.data + panel_begin * weight.panel_bytes + k1 * stride;
            Block block{reinterpret_cast<const char*>(widened), k1 - k0, panel, k0 == 0, k1 == k, ahead, stride};
            if (call.pairs || weight.kind == KIND_F32) block.weights = packed + k0 * PairPanel::ROW_BYTES;
            else if (weight.kind == KIND_PAIRS) widen_pairs(packed, k0, k1, widened);
            else if (weight.kind == KIND_BF16) widen<Bf16Panel>(packed, k0, k1, widened);
            else widen<Int8Panel>(packed, k0, k1, widened);
            float* partial = partials + (panel - panel_begin) * rows * NR;
            for (int64_t t = tile_begin; t < tile_end; ++t) {
                const int64_t row = tiling.row(t);
                const int height = int(tiling.row(t + 1) - row);
                Tile run = call.pairs ? tile_for<PairPanel>(height, t == tile_begin)
                                      : tile_for<F32Panel>(height, t == tile_begin);
                run(call, block, a + row * blocked + k0 / KC * height * ROW, partial + (row - first_row) * NR, row0 + row);
            }
        }
    }
}

static void many_rows(const Call& call, const void* x, int64_t stride, int32_t dtype, int64_t rows) {
    static thread_local Scratch scratch;
    const Weight& weight = *call.weight;
    const int64_t panels = (weight.n + NR - 1) / NR;
    for (int64_t row0 = 0; row0 < rows; row0 += CHUNK_ROWS) {
        const int64_t chunk = row0 + CHUNK_ROWS < rows ? CHUNK_ROWS : rows - row0;
        const Tiling tiling(chunk);
        float* a = scratch.floats(blocked_size(chunk, call.steps()));
        parallel_ranges(threads_for(chunk * weight.k, 65536), tiling.tiles, [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; ++t) {
                const int64_t row = tiling.row(t), height = tiling.row(t + 1) - row;
                block_rows(call, x, stride, dtype, row0 + row, height, a + row * blocked_size(1, call.steps()));
            }
        });
        const int threads = threads_for(chunk * weight.n * weight.k, 100000);
        // At least four tasks a thread where the shape allows: fewer panels a task first, then fewer rows.
        int64_t group = panels / (4 * threads);
        group = group < 1 ? 1 : (group > GROUP_PANELS ? GROUP_PANELS : group);
        const int64_t groups = (panels + group - 1) / group;
        int64_t blocks = (chunk + BLOCK_ROWS - 1) / BLOCK_ROWS;
        if (blocks * groups < 4 * threads && threads > 1) blocks = (4 * threads + groups - 1) / groups;
        if (blocks > tiling.tiles) blocks = tiling.tiles;
        parallel_tasks(threads, groups * blocks, [&](int64_t task) {
            const int64_t block = task % blocks, panel = task / blocks * group;
            many_rows_task(call, a, row0, tiling, tiling.tiles * block / blocks, tiling.tiles * (block + 1) / blocks,
                           panel, panel + group < panels ? panel + group : panels);
        });
    }
}

// ---- rows of a packed weight -----------------------------------------------------------------------------------------

static OCTAVO_INLINE float word_half(const char* words, int lane) {
    return to_float(reinterpret_cast<const bf16*>(words)[2 * (lane % 16) + lane / 16]);
}

template <class T>
static void gather_row(const Weight& weight, int64_t n, T* out) {
    const char* panel = weight.data + n / NR * weight.panel_bytes;
    const int lane = int(n % NR);
    if (weight.kind == KIND_F32) {
        for (int64_t k = 0; k < weight.k; ++k)
            from_float(reinterpret_cast<const float*>(panel)[k * NR + lane], out + k);
    } else if (weight.kind == KIND_BF16) {
        for (int64_t k = 0; k < weight.k; ++k) from_float(word_half(panel + k * Bf16Panel::ROW_BYTES, lane), out + k);
    } else if (weight.kind == KIND_PAIRS) {
        const bf16* words = reinterpret_cast<const bf16*>(panel) + 2 * lane;
        for (int64_t k = 0; k < weight.k; ++k) from_float(to_float(words[k / 2 * 2 * NR + k % 2]), out + k);
    } else {
        for (int64_t k = 0; k < weight.k; ++k) {
            const char* group = panel + k / QGROUP * Int8Panel::GROUP_BYTES;
            const char* quants = group + Int8Panel::SCALE_BYTES + k % QGROUP * NR;
            from_float(float(reinterpret_cast<const int8_t*>(quants)[lane]) * word_half(group, lane), out + k);
        }
    }
}

}  // namespace octavo

// x [m, K] with its row stride in elements; bias [N] float32 or null; out [m, N] with its row stride.
OCTAVO_API void octavo_linear(const void* x, int64_t x_stride, int64_t m, const octavo::Weight* weight,
                              const float* bias, void* out, int64_t out_stride, int32_t x_dtype, int32_t out_dtype) {
    using namespace octavo;
    const bool of_pairs = weight->kind == KIND_PAIRS;
    const Call call{weight, bias, out, out_stride, out_dtype, of_pairs && x_dtype == BF16};
    if (m <= 0 || weight->n <= 0) return;
    if (m <= MAX_TILE && of_pairs == call.pairs) few_row_tile(call, x, x_stride, x_dtype, int(m));
    else many_rows(call, x, x_stride, x_dtype, m);
}

// out [count, K] = rows `ids` of the weight, widened exactly and rounded once; ids must lie in [0, N).
OCTAVO_API void octavo_gather_rows(const int64_t* ids, int64_t count, const octavo::Weight* weight, void* out,
                                   int32_t out_dtype) {
    using namespace octavo;
    parallel_ranges(threads_for(count * weight->k, 16384), count, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            if (out_dtype == F32) gather_row(*weight, ids[t], static_cast<float*>(out) + t * weight->k);
            else gather_row(*weight, ids[t], static_cast<bf16*>(out) + t * weight->k);
        }
    });
}
