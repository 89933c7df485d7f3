// A drafter's last norm, its head and a draw of one row, on Hopper: the kernel of octavo.ops.sampling.drafts_head, behind
// compile/lanes.cu.
//
// Every warp walks over groups of 16 channels by itself, through a ring of its own of STAGES stages of PART k, which is
// full when the row comes; AHEAD more are on their way to the L2 by then. All of them are told to leave the L2 first: the
// layer's weights, which are read in between, stay there for the next draft. A sum is one chain over K in steps of 16, as
// octavo.ops.gemm's; scores are octavo.ops.sampling.drafts_gpu's. The best of all blocks is one number: a score in order,
// and behind it a token, the lower one first.

struct Told {
    u64 x, norm, weight, ids;
    const i64* rows;
    const int *sample_of, *lengths;
    int *token_ids, *total_len;
    const float* temperatures;
    const i64* seeds;
    i64* drafts;
    u64* best;     // zero between launches, as what have arrived
    u32* arrived;
    u64 kept[4], kept_bytes[4];  // what else stays in the L2, until the next step's drafts
    float eps, noise;
    u32 groups;
    int width, place;
};

constexpr u32 PARTS = K / PART, LINE = 2 * PART + 16, STAGE = 16 * LINE;  // bytes: lines in banks of their own
constexpr u32 ROW = 0, BESTS = 2 * K, RING = (BESTS + 8 * WARPS + 127) / 128 * 128;
constexpr u32 CHUNKS = K / 256;  // of 8 numbers, of a lane
static_assert(K % 256 == 0 && (CHUNKS & (CHUNKS - 1)) == 0 && WARPS <= 8, "a warp norms the row");

extern __shared__ __align__(128) unsigned char memory[];

__device__ inline u64 larger(u64 x, u32 other_lane) {
    u64 other = from_lane((u32)x, other_lane) | (u64)from_lane((u32)(x >> 32), other_lane) << 32;
    return x > other ? x : other;
}

// The arithmetic of octavo.ops.sampling.noise, step by step.
__device__ inline u64 mix(u64 x) {  // SplitMix64's finaliser
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}
__device__ inline float log_parts(float whole, float x) {
    int bits = (int)bits_of(whole) - 0x3F3504F3, exponent = bits >> 23;
    float mantissa = number((bits & 0x007FFFFF) + 0x3F3504F3);
    float y = exponent == 0 ? x : less(mantissa, 1.0f);
    float z = times(y, y), e = (float)exponent;
    float p = fused(y, 7.0376836292e-2f, -1.1514610310e-1f);
    p = fused(p, y, 1.1676998740e-1f);
    p = fused(p, y, -1.2420140846e-1f);
    p = fused(p, y, 1.4249322787e-1f);
    p = fused(p, y, -1.6668057665e-1f);
    p = fused(p, y, 2.0000714765e-1f);
    p = fused(p, y, -2.4999993993e-1f);
    p = fused(p, y, 3.3333331174e-1f);
    p = times(times(p, y), z);
    p = fused(e, -2.12194440e-4f, p);
    p = fused(z, -0.5f, p);
    return fused(e, 0.693359375f, plus(y, p));
}
__device__ inline float gumbel(u64 key, u32 token) {
    u32 h = token + (u32)key;
    h = (h ^ (h >> 16)) * 0x21F0AAADu;
    h = h ^ (h >> 15) ^ (u32)(key >> 32);
    h = h * 0xD35A2D97u;
    h = h ^ (h >> 15);
    float w = times((float)h, 2.3283064365386963e-10f);
    w = w < 1.1641532182693481e-10f ? 1.1641532182693481e-10f : w > 0.99999994f ? 0.99999994f : w;
    float e = -log_parts(less(1.0f, w), -w);
    return -log_parts(e, less(e, 1.0f));
}

// The sum of squares of the row in the order of octavo.ops.compile.row_sum, in every lane of a warp.
__device__ inline float squares(u64 x, u32 lane) {
    float part[CHUNKS];
#pragma unroll
    for (u32 j = 0; j < CHUNKS; ++j) {
        Four eight = read(x + 16 * (lane + 32 * j));
        float pair[4];
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            float low = widened(eight.x[i] & 0xffff), high = widened(eight.x[i] >> 16);
            pair[i] = plus(times(low, low), times(high, high));
        }
        part[j] = plus(plus(pair[0], pair[1]), plus(pair[2], pair[3]));
    }
#pragma unroll
    for (u32 half = CHUNKS / 2; half; half /= 2)
#pragma unroll
        for (u32 j = 0; j < half; ++j) part[j] = plus(part[j], part[j + half]);
    float total = part[0];
#pragma unroll
    for (u32 half = 16; half; half /= 2) total = plus(total, number(from_lane(bits_of(total), lane ^ half)));
    return total;
}

// A row is normed by all warps, and each writes its part: in pairs, as lanes of the matrix unit's second operand read it.
__device__ inline void norm_row(const Told& told, u32 base, u32 lane, u32 warp) {
    float inverse = over_exact(1.0f, root(plus(over_exact(squares(told.x, lane), (float)K), told.eps)));
    for (u32 chunk = WARPS * lane + warp; chunk < K / 8; chunk += 32 * WARPS) {
        Four eight = read(told.x + 16 * chunk), low = read(told.norm + 32 * chunk), high = read(told.norm + 32 * chunk + 16);
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            float first = number(i < 2 ? low.x[2 * i] : high.x[2 * i - 4]);
            float second = number(i < 2 ? low.x[2 * i + 1] : high.x[2 * i - 3]);
            first = times(times(widened(eight.x[i] & 0xffff), inverse), first);
            second = times(times(widened(eight.x[i] >> 16), inverse), second);
            put(base + ROW + chunk / 2 * 32 + 8 * i + 4 * (chunk % 2), pack(first, second));
        }
    }
}

struct Walk {  // of a warp
    u32 lane, first, stride, steps, ring;
    u64 weight, policy;
    __device__ u64 at(u32 step, u32 line) const {  // where a line's part begins
        u64 channel = (u64)(first + step / PARTS * stride) * 16 + line;
        return weight + 2 * (channel * K + step % PARTS * PART);
    }
    __device__ void ask(u32 step) const {
        constexpr u32 PIECES = PART / 8, LINES = 32 / PIECES;  // of 16 bytes; that a warp copies at a time
        static_assert(PIECES <= 32 && 16 % LINES == 0, "lines are whole");
        if (step < steps)
#pragma unroll
            for (u32 line = 0; line < 16; line += LINES) {
                u32 own = line + lane / PIECES, piece = lane % PIECES;
                copy16_as(ring + step % STAGES * STAGE + own * LINE + 16 * piece, at(step, own) + 16 * piece, policy);
            }
        commit();
    }
    __device__ void fetch(u32 step) const {  // to the L2, in pieces of 128 bytes
        constexpr u32 PIECES = PART / 64;
        if (step < steps)
#pragma unroll
            for (u32 line = 0; line < 16; line += 32 / PIECES)
                fetch_line(at(step, line + lane / PIECES) + 128 * (lane % PIECES));
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS) product_and_draft(const __grid_constant__ Told told) {
    const u32 lane = thread() % 32, warp = thread() / 32, base = (u32)__cvta_generic_to_shared(memory), quad = lane % 4;
    Walk walk;
    walk.lane = lane, walk.first = block() + blocks() * warp, walk.stride = blocks() * WARPS;
    walk.ring = base + RING + warp * STAGES * STAGE, walk.weight = told.weight, walk.policy = FIRST ? first_evicted() : as_ever();
    const u32 mine = walk.first < told.groups ? (told.groups - walk.first + walk.stride - 1) / walk.stride : 0;
    walk.steps = mine * PARTS;
    for (u32 step = 0; step < STAGES; ++step) walk.ask(step);
    for (u32 step = 0; step < AHEAD; ++step) walk.fetch(STAGES + step);
    for (u32 i = 0; i < 4; ++i)
        for (u64 at = 128 * (u64)(block() * 32 * WARPS + thread()); at < told.kept_bytes[i]; at += 128 * 32 * WARPS * blocks())
            keep_line(told.kept[i] + at);
    // All but the row is there.
    const i64 row = told.rows[0];
    const int total = told.total_len[row];
    const bool is_live = told.sample_of[0] >= 0 && told.lengths[0] > 0;
    const float temperature = times(told.temperatures[row], told.noise);
    const bool is_greedy = temperature == 0.0f;
    const float inverse = is_greedy ? 1.0f : over_exact(1.0f, temperature);
    const u64 key = mix(mix((u64)told.seeds[row] + 0x9E3779B97F4A7C15ull)
                        + (u64)(total + (i64)told.place) * 0x9E3779B97F4A7C15ull);
    float best = number(0xff800000), noise = 0.0f;
    u32 best_token = 0, token = 0;
    u64 found = 0;
    const u32 of_group = lane / 4 + 8 * (quad & 1);  // a lane looks at one channel, and its neighbour but one does too
    if (mine) {
        u32 channel = walk.first * 16 + of_group;
        token = told.ids ? (u32)((const i64*)told.ids)[channel] : channel;
        noise = is_greedy ? 0.0f : gumbel(key, token);
        ready_now(noise);
    }
    wait_for_before();
    let_next_begin();
    norm_row(told, base, lane, warp);
    together();
    u32 step = 0;
    for (u32 turn = 0; turn < mine; ++turn) {
        if (turn) {
            u32 channel = (walk.first + turn * walk.stride) * 16 + of_group;
            token = told.ids ? (u32)((const i64*)told.ids)[channel] : channel;
            noise = is_greedy ? 0.0f : gumbel(key, token);
        }
        float sum[4] = {0, 0, 0, 0};
        for (u32 part = 0; part < PARTS; ++part, ++step) {
            u32 slot = step % STAGES, at = walk.ring + slot * STAGE + lane % 16 * LINE + lane / 16 * 16;
            arrived<STAGES - 1>();  // of so many steps behind it, there or not
            warp_together();
#pragma unroll
            for (u32 i = 0; i < PART / 16; ++i)
                multiply(sum, square(at + 32 * i), get2(base + ROW + (part * (PART / 16) + i) * 32 + 8 * quad));
            warp_together();
            walk.ask(step + STAGES);
        }
        float logit = quad & 1 ? sum[2] : sum[0];
        float score = logit == logit ? fused(logit, inverse, noise) : number(0xff800000);
        if (score > best || (score == best && token < best_token)) best = score, best_token = token;
    }
    if (best > number(0xff800000)) {
        u32 bits = bits_of(plus(best, 0.0f));  // no -0
        found = (u64)(bits ^ ((u32)((int)bits >> 31) | 0x80000000u)) << 32 | (u32)~best_token;
    }
#pragma unroll
    for (u32 half = 16; half; half /= 2) found = larger(found, lane ^ half);
    if (lane == 0) put(base + BESTS + 8 * warp, (u32)found), put(base + BESTS + 8 * warp + 4, (u32)(found >> 32));
    together();
    if (warp) return;
    Two own = get2(base + BESTS + 8 * (lane % WARPS));
    found = own.x[0] | (u64)own.x[1] << 32;
#pragma unroll
    for (u32 half = WARPS / 2; half; half /= 2) found = larger(found, lane ^ half);
    if (lane) return;
    keep_larger(told.best, found);
    if (count_up(told.arrived) != blocks() - 1) return;
    found = take(told.best);
    *told.arrived = 0;
    u32 winner = found ? ~(u32)found : 0;
    told.drafts[0] = winner;
    if (is_live && total + told.place < told.width) told.token_ids[row * told.width + total + told.place] = (int)winner;
}
