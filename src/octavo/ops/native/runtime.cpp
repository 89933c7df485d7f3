// Process-wide state of the native operators: the thread limit, and memory helpers.
#include <atomic>
#include <cstdlib>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "include/pairs.h"

namespace octavo {

static std::atomic<int> thread_limit{1};

int num_threads() { return thread_limit.load(std::memory_order_relaxed); }

void* Scratch::bytes(int64_t size) {
    if (size > size_) {
        std::free(data_);
        size_ = (size + size / 4 + 4095) / 4096 * 4096;
        data_ = std::aligned_alloc(4096, size_);
        if (data_ == nullptr) std::abort();
    }
    return data_;
}

}  // namespace octavo

OCTAVO_API void octavo_set_num_threads(int32_t count) { octavo::thread_limit = count < 1 ? 1 : count; }

OCTAVO_API int32_t octavo_num_threads() { return octavo::num_threads(); }

// Lanes of a float vector: 16, 8 or 4. Only shown to people and tests.
OCTAVO_API int32_t octavo_vector_lanes() { return octavo::VL; }

// Ask for huge pages under [data, data + size): weights are read end to end, so the TLB is the first limit.
OCTAVO_API void octavo_advise_huge(void* data, int64_t size) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + 4095) / 4096 * 4096;
    uintptr_t end = (reinterpret_cast<uintptr_t>(data) + size) / 4096 * 4096;
    if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)data, (void)size;
#endif
}

// out = sums + the products of the words x and w, each [count] (pairs.h), as this library computes them or, where
// asked, by the emulation. For tests, and for the check that both agree on this processor.
OCTAVO_API void octavo_dot_pairs(const float* sums, const float* x, const float* w, float* out, int64_t count,
                                 int32_t emulated) {
    using namespace octavo;
    for (int64_t i = 0; i < count; i += VL) {
        const int64_t left = count - i < VL ? count - i : VL;
        vf s = load_first(sums + i, left), a = load_first(x + i, left), b = load_first(w + i, left);
        store_first(out + i, emulated ? dot_pairs_emulated(s, a, b) : dot_pairs(s, a, b), left);
    }
}
