// Packed weights: panels of 32 output channels, and the chain kernel that walks one.
//
// Layout of a weight [N, K]: panels [ceil(N / 32)][K] of 32 channels each, missing channels zero, the same for every
// instruction set. Per kind, one k of one panel is
//   float32   32 floats
//   bfloat16  16 words: channel j in the low half, j + 16 in the high half, so widening is a shift and a mask
//   pairs     bfloat16, two k at once: 32 words of pairs.h (a K that is odd is padded with a zero)
//   int8      32 bytes; 32 of these k (K padded with zeros) follow 16 words of bfloat16 scales, laid out as above.
// A weight's float32 value is exact in every kind: an int8 times a bfloat16 scale has at most 15 significant bits.
// Invariant: each output is one chain over k = 0..K-1 in ascending order, whatever the tile: acc = fma(x[k], w[k], acc),
// or, of bfloat16 rows with pairs, acc = dot_pairs(acc, x[2p, 2p + 1], w[2p, 2p + 1]).
#pragma once

#include "pairs.h"
#include "vec.h"

namespace octavo {

constexpr int NR = 32;                 // channels of a panel
constexpr int STRIPS = NR / (2 * VL);  // a strip is two vectors: channels [s VL, s VL + VL) and the same plus 16
constexpr int QGROUP = 32;             // k that share an int8 scale
constexpr int MAX_TILE = VL == 8 ? 6 : 12;  // rows of a register tile: 2 accumulators each, of 16 or 32 registers
constexpr int KC = 256;                // steps of a block, a k or a pair: a panel block is 32 KiB
constexpr int ROW = KC + 16;           // floats or words from one row of x to the next in a block: not a power of two, for L1

enum Kind : int32_t { KIND_F32 = 0, KIND_BF16 = 1, KIND_INT8 = 2, KIND_PAIRS = 3 };

// Words of two bfloat16 -> two vectors.
OCTAVO_INLINE void widen_words(const uint32_t* words, vf& low, vf& high) {
    vu w = load_bits<vu>(words);
    low = as_float(w << 16);
    high = as_float(w & 0xffff0000u);
}

// A step of one k.
struct Single {
    static OCTAVO_INLINE vf spread(const float* x) { return splat(*x); }
    static OCTAVO_INLINE vf add(vf x, vf w, vf acc) { return fma(x, w, acc); }
};

// Besides the layout, how a kind is streamed: panels walked together (0: as many as the registers hold), and how far
// ahead it is asked for, into L1 (3) or L2 (2).
struct F32Panel : Single {
    static constexpr int64_t GROUP = 0;  // no scales
    static constexpr int ROW_BYTES = 4 * NR;
    static constexpr int TOGETHER = 0, AHEAD_BYTES = 2048, AHEAD_LEVEL = 3;
    static OCTAVO_INLINE void weights(const char* row, int strip, const vf*, vf* w) {
        w[0] = load(reinterpret_cast<const float*>(row) + strip * VL);
        w[1] = load(reinterpret_cast<const float*>(row) + strip * VL + 16);
    }
    static OCTAVO_INLINE int64_t panel_bytes(int64_t k) { return k * ROW_BYTES; }
};

struct Bf16Panel : Single {
    static constexpr int64_t GROUP = 0;
    static constexpr int ROW_BYTES = 2 * NR;
    static constexpr int TOGETHER = 0, AHEAD_BYTES = 2048, AHEAD_LEVEL = 3;
    static OCTAVO_INLINE void weights(const char* row, int strip, const vf*, vf* w) {
        widen_words(reinterpret_cast<const uint32_t*>(row) + strip * VL, w[0], w[1]);
    }
    static OCTAVO_INLINE int64_t panel_bytes(int64_t k) { return k * ROW_BYTES; }
};

// A row is a pair of k, and so is a word of x.
struct PairPanel {
    static constexpr int64_t GROUP = 0;
    static constexpr int ROW_BYTES = 4 * NR;
    static constexpr int TOGETHER = 0, AHEAD_BYTES = 2048, AHEAD_LEVEL = 3;
    static OCTAVO_INLINE void weights(const char* row, int strip, const vf*, vf* w) {
        w[0] = load_bits<vf>(row + strip * VL * 4);
        w[1] = load_bits<vf>(row + (strip * VL + 16) * 4);
    }
    static OCTAVO_INLINE vf spread(const float* x) { return splat_word(x); }
    static OCTAVO_INLINE vf add(vf x, vf w, vf acc) { return dot_pairs(acc, x, w); }
    static OCTAVO_INLINE int64_t panel_bytes(int64_t pairs) { return pairs * ROW_BYTES; }
};

struct Int8Panel : Single {
    static constexpr int64_t GROUP = QGROUP;
    static constexpr int ROW_BYTES = NR;
    static constexpr int SCALE_BYTES = 2 * NR;
    static constexpr int GROUP_BYTES = SCALE_BYTES + QGROUP * ROW_BYTES;
    static constexpr int TOGETHER = 0, AHEAD_BYTES = 2048, AHEAD_LEVEL = 3;
    static OCTAVO_INLINE void scales(const char* group, int strip, vf* s) {
        widen_words(reinterpret_cast<const uint32_t*>(group) + strip * VL, s[0], s[1]);
    }
    static OCTAVO_INLINE void weights(const char* row, int strip, const vf* s, vf* w) {
        w[0] = load(reinterpret_cast<const int8_t*>(row) + strip * VL) * s[0];
        w[1] = load(reinterpret_cast<const int8_t*>(row) + strip * VL + 16) * s[1];
    }
    static OCTAVO_INLINE int64_t panel_bytes(int64_t k) { return (k + QGROUP - 1) / QGROUP * GROUP_BYTES; }
};

// One row times a weight that comes from memory: every panel walked together is a stream of its own to the memory, which
// serves few best, so only the chains that hide the arithmetic's latency at its pace. In a cache these are slower.
struct F32Stream : F32Panel {
    static constexpr int TOGETHER = 2, AHEAD_BYTES = 4096, AHEAD_LEVEL = 2;
};
struct Bf16Stream : Bf16Panel {
    static constexpr int TOGETHER = 1, AHEAD_BYTES = 8192, AHEAD_LEVEL = 2;
};
struct PairStream : PairPanel {
    static constexpr int TOGETHER = 1, AHEAD_BYTES = 8192, AHEAD_LEVEL = 2;
};

// What a walk asks the memory for ahead of its use, the hardware's own reach being short with several streams:
// nothing; its own panels, as their kind says; or another block of packed weights, into L2.
enum class Fetch { NOTHING, SELF, BLOCK };

// `count` steps of U strips: the packed rows, and the block to fetch ahead, `ahead_stride` bytes for each step.
template <int U>
struct Walk {
    const char* rows[U];
    int strips[U];
    const char* ahead = nullptr;
    int64_t ahead_stride = 0;
};

// Continues the chains of MR rows by `count` steps, within one group of scales. Row m of x is a + m * ROW; acc[m][u] is the
// pair of accumulators of row m in strip u.
template <class P, int MR, int U, Fetch FETCH>
OCTAVO_INLINE void chain_rows(const float* a, Walk<U> walk, const vf (*scales)[2], int64_t count,
                              vf (&acc)[MR][U][2]) {
    _Pragma("GCC unroll 4") for (int64_t k = 0; k < count; ++k) {
        vf w[U][2];
        OCTAVO_UNROLL for (int u = 0; u < U; ++u) {
            P::weights(walk.rows[u], walk.strips[u], scales[u], w[u]);
            if (FETCH == Fetch::SELF && (P::ROW_BYTES >= 64 || k % 2 == 0)) {  // each line once
                for (int line = 0; line < P::ROW_BYTES; line += 64)
                    __builtin_prefetch(walk.rows[u] + P::AHEAD_BYTES + line, 0, P::AHEAD_LEVEL);
            }
            walk.rows[u] += P::ROW_BYTES;
        }
        if constexpr (FETCH == Fetch::BLOCK) {
            __builtin_prefetch(walk.ahead, 0, 2);
            __builtin_prefetch(walk.ahead + 64, 0, 2);
            walk.ahead += walk.ahead_stride;
        }
        OCTAVO_UNROLL for (int m = 0; m < MR; ++m) {
            vf x = P::spread(a + m * ROW + k);
            OCTAVO_UNROLL for (int u = 0; u < U; ++u) {
                acc[m][u][0] = P::add(x, w[u][0], acc[m][u][0]);
                acc[m][u][1] = P::add(x, w[u][1], acc[m][u][1]);
            }
        }
    }
}

// Continues the chains by `count` <= KC steps; walk.rows start at a group border.
template <class P, int MR, int U, Fetch FETCH>
OCTAVO_INLINE void chain(const float* a, Walk<U> walk, int64_t count, vf (&acc)[MR][U][2]) {
    vf scales[U][2] = {};
    if constexpr (P::GROUP == 0) {
        chain_rows<P, MR, U, FETCH>(a, walk, scales, count, acc);
    } else {
        for (int64_t k = 0; k < count; k += P::GROUP) {
            Walk<U> quants = walk;
            OCTAVO_UNROLL for (int u = 0; u < U; ++u) {
                P::scales(walk.rows[u], walk.strips[u], scales[u]);
                if (FETCH == Fetch::SELF) __builtin_prefetch(walk.rows[u] + P::AHEAD_BYTES, 0, P::AHEAD_LEVEL);
                quants.rows[u] = walk.rows[u] + P::SCALE_BYTES;
                walk.rows[u] += P::GROUP_BYTES;
            }
            // Whole groups get a constant trip count.
            if (count - k >= P::GROUP) chain_rows<P, MR, U, FETCH>(a + k, quants, scales, P::GROUP, acc);
            else chain_rows<P, MR, U, FETCH>(a + k, quants, scales, count - k, acc);
        }
    }
}

}  // namespace octavo
