// A GPU's lanes on a CPU, for kernels in CUDA C++ whose instructions are named functions: every lane is a fiber, and
// where lanes meet all of a warp, or of a block, come together. Copies that are asked for arrive as late as they may,
// and until then their place holds NaN. Sums are in float32, one product after the other.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <vector>

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;
struct Four { u32 x[4]; };
struct Two { u32 x[2]; };

#define __device__
#define __global__
#define __shared__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

unsigned char memory[1 << 18] __attribute__((aligned(128)));

struct Map { u64 x[16]; };
struct Copy { u32 to; u64 from; u32 bytes, width; bool told; };  // told: of its coming a barrier tells
struct Sent { u64 to; u32 from, bytes; };
struct Lane {
    ucontext_t context;
    std::vector<char> stack;
    std::vector<Copy> open;
    std::deque<std::vector<Copy>> groups;
    std::vector<Sent> sent;
    std::deque<std::vector<Sent>> sent_groups;
    u32 given[8];
    int waits_for = 0;  // 0 nothing, 1 its warp, 2 + i `count` lanes at barrier i, -1 a barrier in memory
    u32 barrier = 0, turn = 0;
    u32 count = 0;
    bool done = false;
};
static std::vector<Lane> lanes;
static ucontext_t scheduler;
static u32 current, block_id, num_blocks;
static void (*body)();

static u32 thread() { return current; }
static u32 block() { return block_id; }
static u32 blocks() { return num_blocks; }
static u64 __cvta_generic_to_shared(void*) { return 0; }
static void meet(int whom, u32 count = 0) {
    lanes[current].waits_for = whom;
    lanes[current].count = count;
    swapcontext(&lanes[current].context, &scheduler);
}
static void together() { meet(2, lanes.size()); }
static void some_together(u32 barrier, u32 count) { meet(2 + barrier, count); }
static u32 heard[16];
static void tell_some(u32 barrier, u32) { ++heard[barrier]; }
static void warp_together() { meet(1); }
static void let_next_begin() {}
static void wait_for_before() {}
static void begin_lane() {
    body();
    lanes[current].done = true;
    swapcontext(&lanes[current].context, &scheduler);
}
// Barriers in shared memory; what is fetched arrives as late as it may.
struct Fetched { u32 to; u64 from; u32 bytes; };
struct Barrier { u32 count, left, turn; i64 bytes; std::vector<Fetched> open; u64 asked; };
static u64 num_asked;
static std::map<u32, Barrier> barriers;
static Barrier& barrier_at(u32 at) {
    auto found = barriers.find(at);
    if (found == barriers.end()) fprintf(stderr, "no barrier at %u\n", at), abort();
    return found->second;
}
static bool is_ready(const Barrier& own) { return !own.left && !own.bytes; }
static void end_turn(Barrier& own) {
    for (const Fetched& each : own.open) memcpy(memory + each.to, (void*)each.from, each.bytes);
    own.open.clear(), own.left = own.count, own.turn ^= 1;
}
static bool has_turned(u32 at, u32 turn) {
    Barrier& own = barrier_at(at);
    if (is_ready(own) && own.open.empty()) end_turn(own);
    return own.turn != turn;
}
// When no lane can go on: what was asked for last arrives first, one barrier's at a time.
static bool let_arrive() {
    Barrier* last = nullptr;
    for (auto& each : barriers)
        if (is_ready(each.second) && each.second.open.size() && (!last || each.second.asked > last->asked)) last = &each.second;
    if (last) end_turn(*last);
    return last;
}
static void run_block(u32 threads) {
    barriers.clear(), num_asked = 0;
    lanes = std::vector<Lane>(threads);
    memset(memory, 0xff, sizeof memory);
    memset(heard, 0, sizeof heard);
    for (Lane& lane : lanes) {
        lane.stack.resize(1 << 17);
        getcontext(&lane.context);
        lane.context.uc_stack.ss_sp = lane.stack.data();
        lane.context.uc_stack.ss_size = lane.stack.size();
        makecontext(&lane.context, begin_lane, 0);
    }
    for (bool moved = true; moved;) {
        moved = false;
        for (u32 i = 0; i < threads; ++i)
            if (lanes[i].waits_for == -1 && has_turned(lanes[i].barrier, lanes[i].turn)) lanes[i].waits_for = 0;
        for (u32 i = 0; i < threads; ++i) {
            if (lanes[i].done || lanes[i].waits_for) continue;
            current = i, moved = true;
            swapcontext(&scheduler, &lanes[i].context);
        }
        for (u32 first = 0; first < threads; first += 32) {
            u32 there = 0;
            for (u32 i = first; i < first + 32; ++i) there += lanes[i].waits_for == 1;
            if (there == 32) for (u32 i = first; i < first + 32; ++i) lanes[i].waits_for = 0, moved = true;
        }
        for (int barrier = 2; barrier < 18; ++barrier) {
            u32 there = 0, count = 0;
            for (Lane& lane : lanes) if (lane.waits_for == barrier) ++there, count = lane.count;
            if (there && there + heard[barrier - 2] == count) {
                heard[barrier - 2] = 0;
                for (Lane& lane : lanes) if (lane.waits_for == barrier) lane.waits_for = 0, moved = true;
            }
        }
        if (!moved) moved = let_arrive();
    }
    for (auto& each : barriers) if (each.second.open.size()) fprintf(stderr, "a block ends before what it fetches is there\n"), abort();
    for (Lane& lane : lanes) {
        bool waited = lane.open.empty();
        for (auto& group : lane.groups) waited = waited && group.empty();
        if (!waited) fprintf(stderr, "a lane ends before what it copies is there\n"), abort();
    }
    for (Lane& lane : lanes)
        for (auto& group : lane.sent_groups) if (group.size()) fprintf(stderr, "a block ends before what it sends was read\n"), abort();
    for (Lane& lane : lanes) if (!lane.done) fprintf(stderr, "lanes wait for each other\n"), abort();
}

static void copy_bytes(u32 to, u64 from, u32 bytes, u32 width) {
    if (to % width || from % width || (bytes && bytes != width) || to + width > sizeof memory)
        fprintf(stderr, "a copy of %u of %u bytes from %llx to %u\n", bytes, width, from, to), abort();
    memset(memory + to, 0xff, width);
    lanes[current].open.push_back(Copy{to, from, bytes, width, false});
}
static void copy16(u32 to, u64 from, u32 bytes) { copy_bytes(to, from, bytes, 16); }
static void copy4(u32 to, u64 from, u32 bytes) { copy_bytes(to, from, bytes, 4); }
static void commit() {
    lanes[current].groups.push_back(lanes[current].open);
    lanes[current].open.clear();
}
template <int LEFT> static void arrived() {
    auto& groups = lanes[current].groups;
    while ((int)groups.size() > LEFT) {
        for (const Copy& copy : groups.front()) {
            if (copy.told) continue;
            memset(memory + copy.to, 0, copy.width);
            memcpy(memory + copy.to, (void*)copy.from, copy.bytes);
        }
        groups.pop_front();
    }
}
// What is sent leaves as late as it may.
static void send(u64 to, u32 from, u32 bytes) {
    if (to % 16 || from % 16 || bytes % 16 || from + bytes > sizeof memory) fprintf(stderr, "what is sent\n"), abort();
    lanes[current].sent.push_back(Sent{to, from, bytes});
}
static void send_box(const Map&, u64 base, int column, int line, u32 from) {
    if (from % 1024) fprintf(stderr, "a box at %u\n", from), abort();
    for (u32 own = 0; own < 64; ++own)
        for (u32 part = 0; part < 8; ++part)
            send(base + ((i64)(line + own) * 128 + column + part * 4) * 4, from + own * 128 + (part ^ own % 8) * 16, 16);
}
static void commit_sent() {
    lanes[current].sent_groups.push_back(lanes[current].sent);
    lanes[current].sent.clear();
}
template <int LEFT> static void was_read() {
    auto& groups = lanes[current].sent_groups;
    while ((int)groups.size() > LEFT) {
        for (const Sent& each : groups.front()) memcpy((void*)each.to, memory + each.from, each.bytes);
        groups.pop_front();
    }
}
static void prepare(u32 barrier, u32 count) { barriers[barrier] = Barrier{count, count, 0, 0, {}, 0}; }
static void prepared() {}
static void arrive(u32 barrier) {
    has_turned(barrier, 0);
    Barrier& own = barrier_at(barrier);
    if (!own.left) fprintf(stderr, "one too many at barrier %u\n", barrier), abort();
    --own.left;
}
static void arrive_behind_copies(u32 barrier) {
    arrive(barrier);
    for (Copy& copy : lanes[current].open) {
        if (!copy.told) barrier_at(barrier).open.push_back(Fetched{copy.to, copy.from, copy.bytes});
        copy.told = true;
    }
}
static void expect(u32 barrier, u32 bytes) {
    has_turned(barrier, 0);
    barrier_at(barrier).bytes += bytes;
    arrive(barrier);
}
static void wait_for(u32 barrier, u32 turn) {
    lanes[current].barrier = barrier, lanes[current].turn = turn;
    meet(-1);
}
static void fetch(u32 to, u64 from, u32 bytes, u32 barrier) {
    if (to % 16 || from % 16 || bytes % 16 || to + bytes > sizeof memory) fprintf(stderr, "a fetch of %u\n", bytes), abort();
    memset(memory + to, 0xff, bytes);
    Barrier& own = barrier_at(barrier);
    own.asked = ++num_asked, own.bytes -= bytes, own.open.push_back(Fetched{to, from, bytes});
}
static void fetch_box(const Map&, u64 base, int line, u32 to, u32 barrier) {
    if (to % 1024) fprintf(stderr, "a box at %u\n", to), abort();
    for (u32 own = 0; own < 128; ++own)
        for (u32 part = 0; part < 8; ++part)
            fetch(to + own * 128 + (part ^ own % 8) * 16, base + ((i64)(line + own) * 8 + part) * 16, 16, barrier);
}
static void fetch_tile(const Map&, u64 base, i64 pitch, int column, int line, u32 to, u32 barrier) {
    if (to % 1024) fprintf(stderr, "a tile at %u\n", to), abort();
    for (u32 own = 0; own < 64; ++own)
        for (u32 part = 0; part < 8; ++part)
            fetch(to + own * 128 + (part ^ own % 8) * 16, base + (line + own) * pitch + column * 2 + part * 16, 16, barrier);
}
static void send_lines(const Map&, u64 base, int line, u32 from) {
    if (from % 1024) fprintf(stderr, "lines at %u\n", from), abort();
    for (u32 own = 0; own < 128; ++own)
        for (u32 part = 0; part < 8; ++part)
            send(base + ((i64)(line + own) * 8 + part) * 16, from + own * 128 + (part ^ own % 8) * 16, 16);
}
static u32 get(u32 at) { u32 x; memcpy(&x, memory + at, 4); return x; }
static Two get2(u32 at) { Two x; if (at % 8) abort(); memcpy(&x, memory + at, 8); return x; }
static Four get4(u32 at) { Four x; if (at % 16) abort(); memcpy(&x, memory + at, 16); return x; }
static void put(u32 at, u32 x) { memcpy(memory + at, &x, 4); }
static void put2(u32 at, const Two& y) { if (at % 8) abort(); memcpy(memory + at, &y, 8); }
static void put4(u32 at, const Four& y) { if (at % 16) abort(); memcpy(memory + at, &y, 16); }
static Four read(u64 at) { Four y; if (at % 16) abort(); memcpy(&y, (void*)at, 16); return y; }
static u32 read1(u64 at) { u32 x; if (at % 4) abort(); memcpy(&x, (void*)at, 4); return x; }
static Two read2(u64 at) { Two y; if (at % 8) abort(); memcpy(&y, (void*)at, 8); return y; }
static u32 read_half(u64 at) { u16 x; memcpy(&x, (void*)at, 2); return x; }
static void write1(u64 at, u32 x) { if (at % 4) abort(); memcpy((void*)at, &x, 4); }
static void write2(u64 at, const Two& y) { if (at % 8) abort(); memcpy((void*)at, &y, 8); }
static void write(u64 at, const Four& y) { if (at % 16) abort(); memcpy((void*)at, &y, 16); }
static int count_bits(u32 x) { return __builtin_popcount(x); }
static u32 bits_of(float x) { u32 y; memcpy(&y, &x, 4); return y; }
static float number(u32 x) { float y; memcpy(&y, &x, 4); return y; }
static float times(float x, float y) { volatile float z = x * y; return z; }
static float plus(float x, float y) { volatile float z = x + y; return z; }
static float less(float x, float y) { volatile float z = x - y; return z; }
static float over(float x, float y) { return x / y; }
static float over_exact(float x, float y) { return x / y; }
static float root(float x) { return sqrtf(x); }
static float exponential(float x) { return expf(x); }
static u32 bytes_of(u32 x, u32 y, u32 which) {
    u64 both = x | (u64)y << 32;
    u32 found = 0;
    for (int i = 0; i < 4; ++i) found |= (u32)(both >> 8 * (which >> 4 * i & 7) & 0xff) << 8 * i;
    return found;
}
#if HALF
static float widened(u32 x) {
    u16 bits = x;
    _Float16 y;
    memcpy(&y, &bits, 2);
    return y;
}
static u32 rounded_bits(float x) {
    _Float16 y = x;
    u16 bits;
    memcpy(&bits, &y, 2);
    return bits;
}
#else
static float widened(u32 x) { return number(x << 16); }
static u32 rounded_bits(float x) {
    u32 y = bits_of(x);
    if (x != x) return 0x7fff;
    return (y + 0x7fff + (y >> 16 & 1)) >> 16;
}
#endif
static u32 pack(float low, float high) { return rounded_bits(low) | rounded_bits(high) << 16; }

#ifndef TF32
#define TF32 0xffffe000u  // bits that the matrix unit takes of a float32
#endif
// All lanes of a warp give eight numbers, and each then reads what it wants of all.
template <class F> static void exchange(const u32 (&given)[8], F use) {
    u32 first = current / 32 * 32;
    memcpy(lanes[current].given, given, sizeof given);
    meet(1);
    use([first](u32 lane, int i) { return lanes[first + lane].given[i]; });
    meet(1);
}
static u32 from_lane(u32 x, u32 lane) {
    u32 found = 0;
    exchange({x}, [&](auto of) { found = of(lane % 32, 0); });
    return found;
}
static Four square(u32 at) {
    Four y;
    u32 lane = current % 32;
    if (at % 16) abort();
    exchange({at}, [&](auto of) {
        for (u32 i = 0; i < 4; ++i) y.x[i] = get(of(8 * i + lane / 4, 0) + lane % 4 * 4);
    });
    return y;
}
static Four square_turned(u32 at) {
    Four y;
    u32 lane = current % 32;
    if (at % 16) abort();
    exchange({at}, [&](auto of) {
        for (u32 i = 0; i < 4; ++i) {
            u16 pair[2];
            for (u32 k = 0; k < 2; ++k) memcpy(&pair[k], memory + of(8 * i + lane % 4 * 2 + k, 0) + lane / 4 * 2, 2);
            y.x[i] = pair[0] | (u32)pair[1] << 16;
        }
    });
    return y;
}
static void put_square(u32 at, const Four& y) {
    u32 lane = current % 32;
    if (at % 16) abort();
    exchange({at}, [&](auto of) {
        for (u32 i = 0; i < 4; ++i) put(of(8 * i + lane / 4, 0) + lane % 4 * 4, y.x[i]);
    });
}
static u32 transposed(u32 x) {
    u32 y = 0;
    exchange({x}, [&](auto of) {
        u32 lane = current % 32;
        for (u32 k = 0; k < 2; ++k) {
            u32 word = of((lane % 4 * 2 + k) * 4 + lane / 8, 0);
            y |= (lane / 4 % 2 ? word >> 16 : word & 0xffff) << 16 * k;
        }
    });
    return y;
}
static int min(int x, int y) { return x < y ? x : y; }
static int max(int x, int y) { return x > y ? x : y; }
static void multiply(float (&sum)[4], const Four& a, const Two& b) {
    exchange({a.x[0], a.x[1], a.x[2], a.x[3], b.x[0], b.x[1]}, [&](auto of) {
        u32 lane = current % 32;
        for (u32 i = 0; i < 4; ++i) {
            u32 row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
            float total = sum[i];
            for (u32 k = 0; k < 16; ++k) {
                u32 x = of(row % 8 * 4 + k % 8 / 2, row / 8 + k / 8 * 2), y = of(column * 4 + k % 8 / 2, 4 + k / 8);
                total += widened(k % 2 ? x >> 16 : x & 0xffff) * widened(k % 2 ? y >> 16 : y & 0xffff);
            }
            sum[i] = total;
        }
    });
}
template <int N> static void hold(float (&)[N][4]) {}
static void hold(int&) {}
template <int N> static void hold(Four (&)[N]) {}
template <int COUNT> static void take_registers() {}
template <int COUNT> static void give_registers() {}
static void seen_by_groups() {}
static void group_begin() {}
static void group_commit() {}
template <int LEFT, int N> static void group_arrived(float (&)[N][4]) {}
// A warp's rows of a warp group's product; element(k, n): where the second operand's is.
template <int N, class F> static void multiply_by(float (&sum)[N][4], const Four& a, F element) {
    exchange({a.x[0], a.x[1], a.x[2], a.x[3]}, [&](auto of) {
        u32 lane = current % 32;
        for (u32 i = 0; i < N * 4; ++i) {
            u32 row = lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
            float total = sum[i / 4][i % 4];
            for (u32 k = 0; k < 16; ++k) {
                u32 x = of(row % 8 * 4 + k % 8 / 2, row / 8 + k / 8 * 2);
                u16 y;
                memcpy(&y, memory + element(k, column), 2);
                total += widened(k % 2 ? x >> 16 : x & 0xffff) * widened(y);
            }
            sum[i / 4][i % 4] = total;
        }
    });
}
static void group_multiply(float (&sum)[8][4], const Four& a, u32 at) {
    if (at % 32 || at / 128 % 8) abort();
    multiply_by(sum, a, [at](u32 k, u32 n) {
        u32 inner = at % 128 + k * 2;
        return at / 128 * 128 + n * 128 + (inner / 16 ^ n % 8) * 16 + inner % 16;
    });
}
static void group_multiply_turned(float (&sum)[8][4], const Four& a, u32 at) {
    if (at % 1024) abort();
    multiply_by(sum, a, [=](u32 k, u32 n) { return at + k * 128 + (n / 8 ^ k % 8) * 16 + n % 8 * 2; });
}
// A warp's 16 of 64 lines, as it would hold them in registers.
static Four lines_of(u32 at) {
    if (at % 32 || at / 128 % 8) abort();
    u32 lane = current % 32, first = current / 32 % 4 * 16 + lane / 4;
    Four a;
    for (u32 i = 0; i < 4; ++i) {
        u32 inner = at % 128 + i / 2 * 16 + lane % 4 * 4, line = first + i % 2 * 8;
        a.x[i] = get(at / 128 * 128 + line * 128 + (inner / 16 ^ line % 8) * 16 + inner % 16);
    }
    return a;
}
static void group_multiply_tiles(float (&sum)[8][4], u32 a, u32 at, bool adds) {
    if (!adds) memset(sum, 0, sizeof sum);
    group_multiply(sum, lines_of(a), at);
}
static void group_multiply_tile_turned(float (&sum)[8][4], u32 a, u32 at, bool adds) {
    if (!adds) memset(sum, 0, sizeof sum);
    group_multiply_turned(sum, lines_of(a), at);
}
static void group_multiply_turned(float (&sum)[16][4], const Four& a, u32 at, u32 apart) {
    if (at % 1024 || apart % 1024) abort();
    multiply_by(sum, a, [=](u32 k, u32 n) { return at + n / 64 * apart + k * 128 + (n % 64 / 8 ^ k % 8) * 16 + n % 8 * 2; });
}
static void multiply_tf32(float (&sum)[4], const Four& a, const Two& b) {
    exchange({a.x[0], a.x[1], a.x[2], a.x[3], b.x[0], b.x[1]}, [&](auto of) {
        u32 lane = current % 32;
        for (u32 i = 0; i < 4; ++i) {
            u32 row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
            float total = sum[i];
            for (u32 k = 0; k < 8; ++k) {
                u32 x = of(row % 8 * 4 + k % 4, row / 8 + k / 4 * 2), y = of(column * 4 + k % 4, 4 + k / 4);
                total += number(x & TF32) * number(y & TF32);
            }
            sum[i] = total;
        }
    });
}
