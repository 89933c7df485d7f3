// A head's product that draws, on Hopper: the kernel of octavo.ops.sampling.fused_lm_head_sampling, behind the ring's text.
//
// A cluster walks over tiles of channels, which are token ids, with the same rows. A thread keeps the best score that
// it has seen of each of its two rows; the logits are never written. Scores and ties are those of octavo.ops.sampling.gpu.
// While a group looks at its sums, the ring fills for the next tile. What blocks have found, the last block of a row
// tile brings together.

static_assert(ROWS_FIRST && !GATED, "a thread has many channels of few rows");
static_assert(PARTS == 1 && WIDTH == 256, "eight chunks of a row");

constexpr u32 NAN_BIT = 1u << 30;  // beside a token id
constexpr u32 CHUNK = 8;  // sums that are looked at together: two of each of four blocks of 8 channels
#define LOWEST __int_as_float(0xff800000)
typedef long long s64;

// What a row draws with: the rows' places in the tables of temperatures and seeds, and positions.
struct Tables {
    const s64* rows;
    const float* temperatures;
    const s64* seeds;
    const s64* positions;
};

// What blocks have found, [parts, lines], and how many of a row tile have told so; the best score of a line that any
// block has told on its way, as `ordered`. Between launches the last two are zero.
struct Parts {
    float* scores;
    u32* codes;
    u32* arrived;
    u32* told;
};

__device__ inline u32 ordered(float score) {  // as scores, but for -0 and 0
    int bits = __float_as_int(score);
    return bits ^ (bits >> 31 | (int)0x80000000);
}

__device__ inline float scored(u32 ordered) {
    return __int_as_float(ordered ^ (~((int)ordered >> 31) | 0x80000000));
}

__device__ inline u64 mix(u64 x) {  // SplitMix64's finaliser
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

// A row of a thread. Sampled rows have an `amount` of 1; others a score that is the logit.
struct Row {
    u32 low, high;          // of the key of (seed, position)
    float inverse, amount;  // of the temperature, of noise
    float best, bar;        // of this thread; what a score has to be above
    u32 code;

    __device__ Row(const Tables& tables, int line, bool is_there)
        : low(0), high(0), inverse(1.0f), amount(0.0f), best(LOWEST), bar(LOWEST), code(0) {
        if (!is_there) return;
        s64 row = tables.rows[line];
        float temperature = tables.temperatures[row];
        u64 key = mix(mix((u64)tables.seeds[row] + 0x9E3779B97F4A7C15ull)
                      + (u64)tables.positions[line] * 0x9E3779B97F4A7C15ull);
        low = (u32)key, high = (u32)(key >> 32);
        if (temperature == 0.0f) return;
        inverse = __fdiv_rn(1.0f, temperature), amount = 1.0f;
    }
    __device__ void take(float score, u32 id) {
        best = bar = score;
        code = (code & NAN_BIT) | id;
    }
    // What another block has told, or another thread of the row: its token may be a higher one, so an equal score here
    // still counts. Nothing told, or no score, is not a number.
    __device__ void hear(u32 told) { bar = fmaxf(bar, scored(told - 2)); }
    // To be told where two threads or more have the row's bar.
    __device__ void tell(u32* told, u32 heard) const {
        if (ordered(bar) > heard) atomicMax(told, ordered(bar));
    }
    // The better one of two threads, or of two blocks.
    __device__ void merge(float score, u32 other) {
        u32 id = other & (NAN_BIT - 1), own = code & (NAN_BIT - 1);
        bool is_better = score > best || (score == best && id < own);
        code = ((code | other) & NAN_BIT) | (is_better ? id : own);
        best = is_better ? score : best;
    }
};

// The arithmetic of octavo.ops.sampling.noise, step by step.

// But for the last step. place: of the stream, a token id and the key's low half.
__device__ inline u32 mixed_word(const Row& row, u32 place) {
    u32 h = (place ^ (place >> 16)) * 0x21F0AAADu;
    h = h ^ (h >> 15) ^ row.high;
    return h * 0xD35A2D97u;
}

__device__ inline u32 uniform_word(const Row& row, u32 id) {
    u32 h = mixed_word(row, id + row.low);
    return h ^ (h >> 15);
}

__device__ inline float log_parts(float whole, float x) {
    int bits = __float_as_int(whole) - 0x3F3504F3, exponent = bits >> 23;
    float mantissa = __int_as_float((bits & 0x007FFFFF) + 0x3F3504F3);
    float y = exponent == 0 ? x : __fadd_rn(mantissa, -1.0f);
    float z = __fmul_rn(y, y), e = (float)exponent;
    float p = __fmaf_rn(y, 7.0376836292e-2f, -1.1514610310e-1f);
    p = __fmaf_rn(p, y, 1.1676998740e-1f);
    p = __fmaf_rn(p, y, -1.2420140846e-1f);
    p = __fmaf_rn(p, y, 1.4249322787e-1f);
    p = __fmaf_rn(p, y, -1.6668057665e-1f);
    p = __fmaf_rn(p, y, 2.0000714765e-1f);
    p = __fmaf_rn(p, y, -2.4999993993e-1f);
    p = __fmaf_rn(p, y, 3.3333331174e-1f);
    p = __fmul_rn(__fmul_rn(p, y), z);
    p = __fmaf_rn(e, -2.12194440e-4f, p);
    p = __fmaf_rn(z, -0.5f, p);
    return __fmaf_rn(e, 0.693359375f, __fadd_rn(y, p));
}

__device__ inline float gumbel(u32 word) {
    float w = __fmul_rn((float)word, 2.3283064365386963e-10f);
    w = fminf(fmaxf(w, 1.1641532182693481e-10f), 0.99999994f);
    float e = -log_parts(__fadd_rn(1.0f, -w), -w);
    return -log_parts(e, __fadd_rn(e, -1.0f));
}

// At least the score of a logit up to x with a mixed word from `word` on, close to it where noise is large; NaN if x is,
// or where the word may be next to zero. -log1p(-w) >= w. The last step of a word changes its low 17 bits only, so the
// word without that step tells it to 2^17; 512 more are for roundings to float, 1e-4 for the logarithms' errors.
__device__ inline float bound(const Row& row, float x, u32 word) {
    float log;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log) : "f"(__fadd_rn((float)word, -131584.0f)));
    float noise = __fmaf_rn(log, -0.6931471805599453f, 22.1808098f);  // -ln(2), 32 ln(2) + 1e-4
    return __fmaf_rn(x, row.inverse, __fmul_rn(noise, row.amount));
}

__device__ inline float larger_or_nan(float a, float b) {
    float value;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(value) : "f"(a), "f"(b));
    return value;
}

__device__ inline void store_own(u32 at, float value) {
    asm volatile("st.shared.f32 [%0], %1;" :: "r"(at), "f"(value) : "memory");
}

__device__ inline float load_own(u32 at) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(at) : "memory");
    return value;
}

typedef float Chunk[CHUNK];

__device__ inline u32 further(u32 i) { return i / 2 * 8 + i % 2; }  // ids of a chunk, from its first

// The multiplier adds beside the unit that the rest of a word keeps busy; the grid's second side is 1.
__device__ inline u32 beyond(u32 place, u32 ids) {
    u32 sum;
    asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(sum) : "r"(gridDim.y), "r"(ids), "r"(place));
    return sum;
}

// Whether a chunk may have a score above the bar: by its largest logit and its smallest word. place: of its tile's first
// id; from: of the chunk, from there.
__device__ inline bool may_win(const Row& row, const Chunk& x, u32 place, u32 from) {
    u32 least = ~0u;
    float top = LOWEST;
#pragma unroll
    for (u32 i = 0; i < CHUNK; i += 2) {
        least = __vimin3_u32(least, mixed_word(row, beyond(place, from + further(i))),
                             mixed_word(row, beyond(place, from + further(i + 1))));
        top = larger_or_nan(top, larger_or_nan(x[i], x[i + 1]));
    }
    return !(bound(row, top, least) <= row.bar);
}

__device__ inline u32 above(const Row& row, const Chunk& bounds) {
    u32 found = 0;
#pragma unroll
    for (u32 i = 0; i < CHUNK; ++i) found |= !(bounds[i] <= row.bar) ? 1u << i : 0u;
    return found;
}

// The exact score of the first that is wanted, if any is. id: of a chunk's first; logits: of it, in shared memory.
__device__ inline void score_one(Row& row, u32 logits, u32 id, u32 wanted) {
    u32 i = (__ffs(wanted) - 1) % CHUNK, own = id + further(i);
    float value = load_own(logits + i * CONSUMERS * 4);
    float score = __fmaf_rn(value, row.inverse, __fmul_rn(gumbel(uniform_word(row, own)), row.amount));
    if (!wanted) return;
    if (value != value) row.code |= NAN_BIT;
    else if (score > row.bar) row.take(score, own);
}

// Exact scores of those of a chunk of each row that may be best, of both rows at a time. ids: of the first.
__device__ inline void settle(Row (&rows)[2], const Chunk (&x)[2], const u32 (&ids)[2], u32 room) {
    Chunk bounds[2];
#pragma unroll
    for (u32 half = 0; half < 2; ++half)
#pragma unroll
        for (u32 i = 0; i < CHUNK; ++i) {
            store_own(room + (half * CHUNK + i) * CONSUMERS * 4, x[half][i]);
            u32 word = mixed_word(rows[half], ids[half] + rows[half].low + further(i));
            bounds[half][i] = bound(rows[half], x[half][i], word);
        }
    u32 first = above(rows[0], bounds[0]), second = above(rows[1], bounds[1]);
#pragma unroll 1
    while (first | second) {
        score_one(rows[0], room, ids[0], first);
        score_one(rows[1], room + CHUNK * CONSUMERS * 4, ids[1], second);
        first &= (first - 1) & above(rows[0], bounds[0]);
        second &= (second - 1) & above(rows[1], bounds[1]);
    }
}

__device__ inline float at_chunk(const Sums& sums, u32 c, u32 at) {
    float x[8];
#pragma unroll
    for (u32 i = 0; i < 8; ++i) x[i] = sums[0][16 * i + at];
#pragma unroll
    for (u32 i = 0; i < 8; i += 2) x[i] = c & 1 ? x[i + 1] : x[i];
    x[0] = c & 2 ? x[2] : x[0], x[4] = c & 2 ? x[6] : x[4];
    return c & 4 ? x[4] : x[0];
}

// A thread's sums of its rows, with noise. id: of the tile's first channel of this thread. Of each row the lanes settle
// chunks of their own.
__device__ inline void look_with_noise(Row (&rows)[2], const Sums& sums, u32 id, u32 room) {
    u32 found[2] = {0, 0};  // chunks to be settled
#pragma unroll
    for (u32 half = 0; half < 2; ++half)
#pragma unroll
        for (u32 c = 0; c < WIDTH / 32; ++c) {
            Chunk x;
#pragma unroll
            for (u32 i = 0; i < CHUNK; ++i) x[i] = sums[0][16 * c + 4 * (i / 2) + 2 * half + i % 2];
            found[half] |= may_win(rows[half], x, id + rows[half].low, 32 * c) ? 1u << c : 0u;
        }
#pragma unroll 1
    while (__any_sync(~0u, found[0] | found[1])) {
        Chunk x[2];
        u32 ids[2];
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            u32 c = (__ffs(found[half]) - 1) % 8;
            ids[half] = id + 32 * c;
#pragma unroll
            for (u32 i = 0; i < CHUNK; ++i) {
                float value = at_chunk(sums, c, 4 * (i / 2) + 2 * half + i % 2);
                x[half][i] = found[half] ? value : LOWEST;
            }
            found[half] &= found[half] - 1;
        }
        settle(rows, x, ids, room);
#pragma unroll
        for (u32 half = 0; half < 2; ++half)
            for (u32 step = 1; step < 4; step *= 2)
                rows[half].hear(ordered(__shfl_xor_sync(~0u, rows[half].bar, step)));
    }
}

// The same without noise.
__device__ inline void look(Row& row, const Sums& sums, u32 half, u32 id) {
    float tops[4] = {LOWEST, LOWEST, LOWEST, LOWEST};
#pragma unroll
    for (u32 i = 0; i < PARTS * WIDTH / 4; ++i) {
        const float* s = sums[i / (WIDTH / 4)];
        tops[i % 4] = larger_or_nan(tops[i % 4], s[4 * (i % (WIDTH / 4) / 2) + 2 * half + i % 2]);
    }
    float top = larger_or_nan(larger_or_nan(tops[0], tops[1]), larger_or_nan(tops[2], tops[3]));
    if (top <= row.bar) return;
    if (top != top) {
        row.code |= NAN_BIT;
        top = LOWEST;
#pragma unroll
        for (u32 i = 0; i < PARTS * WIDTH / 4; ++i)
            top = fmaxf(top, sums[i / (WIDTH / 4)][4 * (i % (WIDTH / 4) / 2) + 2 * half + i % 2]);
        if (top <= row.bar) return;
    }
    u32 found = 0;
#pragma unroll
    for (int i = PARTS * WIDTH / 4 - 1; i >= 0; --i) {  // the lowest is the last
        u32 part = i / (WIDTH / 4), block = i % (WIDTH / 4) / 2;
        if (sums[part][4 * block + 2 * half + i % 2] == top) found = part * WIDTH + 8 * block + i % 2;
    }
    row.take(top, id + found);
}

__device__ inline u32 load_now(const u32* at) {  // what other blocks write
    u32 value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

// Channels that there are not, of the last tile: never best.
__device__ inline void hide_from(Sums& sums, int id, int channels) {
#pragma unroll
    for (u32 i = 0; i < PARTS * WIDTH / 2; ++i) {
        u32 part = i / (WIDTH / 2), own = i % (WIDTH / 2);
        if (id + (int)(part * WIDTH + 8 * (own / 4) + own % 2) >= channels) sums[part][own] = LOWEST;
    }
}

// The best of a row tile's blocks, by the last of them.
__device__ inline void fold(const Parts& parts, u32 num_parts, u32 lines, int first_line, int rows, s64* tokens,
                            unsigned char* failed, unsigned char* memory) {
    float* scores = (float*)memory;
    u32* codes = (u32*)memory + CONSUMERS;
    u32 own = threadIdx.x % FIRST_LINES, share = threadIdx.x / FIRST_LINES;
    constexpr u32 SHARES = CONSUMERS / FIRST_LINES;
    Row row(Tables(), 0, false);
    row.code = NAN_BIT - 1;
#pragma unroll 8
    for (u32 part = share; part < num_parts; part += SHARES) {
        u32 at = part * lines + first_line + own;
        row.merge(__ldcg(parts.scores + at), __ldcg(parts.codes + at));
    }
    scores[threadIdx.x] = row.best, codes[threadIdx.x] = row.code;
    if (!share) parts.told[first_line + own] = 0;
    asm volatile("bar.sync 1, %0;" :: "n"(CONSUMERS) : "memory");
    if (share || first_line + (int)own >= rows) return;
    for (u32 other = 1; other < SHARES; ++other)
        row.merge(scores[other * FIRST_LINES + own], codes[other * FIRST_LINES + own]);
    tokens[first_line + own] = row.best > LOWEST ? (s64)(row.code & (NAN_BIT - 1)) : 0;
    failed[first_line + own] = row.code >= NAN_BIT;
}

// steps: K / 64. channel_clusters: clusters of the same rows, each of which takes every so many-th tile of channels.
extern "C" __global__ void __launch_bounds__(CONSUMERS + PRODUCERS, 1) product_and_draw(
    const __grid_constant__ TensorMap first, const __grid_constant__ TensorMap second, const Tables tables,
    const Parts parts, s64* tokens, unsigned char* failed, int rows, int channels, int steps, int channel_clusters) {
    extern __shared__ __align__(1024) unsigned char memory[];
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    u32 ring = (u32)__cvta_generic_to_shared(memory), full = ring + STAGES * STAGE_BYTES, empty = full + 8 * STAGES;
    u32 room = empty + 8 * STAGES + 4 * threadIdx.x;
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Place at(channel_clusters);
    int stride = channel_clusters * FIRST_SHARED * SECOND_LINES;
    int tiles = (channels - (at.second_line - (int)(at.second_rank * SECOND_LINES)) + stride - 1) / stride;
    begin(full, empty);
    if (warp >= GROUPS * 4) {
        if (CONSUMER_REGISTERS) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == CONSUMERS)
            produce(&first, &second, Walk{at, 0, steps, stride}, ring, full, empty, tiles * steps);
        return;  // nothing reaches in later, see the other kernel of the ring
    }
    if (CONSUMER_REGISTERS)
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(CONSUMER_REGISTERS ? CONSUMER_REGISTERS : 24));
    asm volatile("griddepcontrol.wait;" ::: "memory");
    int line = at.first_line + warp * 16 + lane / 4;
    Row own[2] = {Row(tables, line, line < rows), Row(tables, line + 8, line + 8 < rows)};
    bool samples = __any_sync(~0u, own[0].amount != 0.0f || own[1].amount != 0.0f);
    Reader reader(at, empty);
    int second_line = at.second_line;
    Sums sums;
    for (int left = tiles * steps; left > 0; left -= steps, second_line += stride) {
        u32 heard[2];
        clear(sums);
        for (int step = 0; step < steps; ++step) {
            issue(sums, reader, warp / 4, ring, full);
            if (step == steps / 2)  // so late that others have told of the tile before
                heard[0] = load_now(parts.told + line), heard[1] = load_now(parts.told + line + 8);
            follow(reader, 0 < step && step <= left - STAGES);
        }
        finish(sums, reader, steps <= left - STAGES);
        int id = second_line + 2 * (lane % 4);
        if (second_line + (int)SECOND_LINES > channels) hide_from(sums, id, channels);
        own[0].hear(heard[0]), own[1].hear(heard[1]);
        if (samples) look_with_noise(own, sums, id, room);
        else look(own[0], sums, 0, id), look(own[1], sums, 1, id);
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            for (u32 step = 1; step < 4; step *= 2)  // later ids win no ties
                own[half].bar = fmaxf(own[half].bar, __shfl_xor_sync(~0u, own[half].bar, step));
            if (lane % 4 == 0) own[half].tell(parts.told + line + 8 * half, heard[half]);
        }
    }
#pragma unroll
    for (u32 half = 0; half < 2; ++half)
        for (u32 step = 1; step < 4; step *= 2)
            own[half].merge(__shfl_xor_sync(~0u, own[half].best, step), __shfl_xor_sync(~0u, own[half].code, step));
    u32 lines = gridDim.x / (FIRST_SHARED * channel_clusters) * FIRST_LINES, num_parts = channel_clusters * FIRST_SHARED;
    u32 part = at.second_line / SECOND_LINES * lines + line;
    if (lane % 4 == 0) {
        parts.scores[part] = own[0].best, parts.codes[part] = own[0].code;
        parts.scores[part + 8] = own[1].best, parts.codes[part + 8] = own[1].code;
    }
    __threadfence();
    asm volatile("bar.sync 1, %0;" :: "n"(CONSUMERS) : "memory");  // the ring is read too
    if (threadIdx.x == 0) {
        u32* arrived = parts.arrived + at.first_line / FIRST_LINES;
        bool is_last = atomicAdd(arrived, 1) == num_parts - 1;
        if (is_last) *arrived = 0;
        *(volatile u32*)memory = is_last;
    }
    asm volatile("bar.sync 1, %0;" :: "n"(CONSUMERS) : "memory");
    bool is_last = *(volatile u32*)memory;
    asm volatile("bar.sync 1, %0;" :: "n"(CONSUMERS) : "memory");
    if (!is_last) return;
    __threadfence();
    fold(parts, num_parts, lines, at.first_line, rows, tokens, failed, memory);
}
