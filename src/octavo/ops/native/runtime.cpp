// Process-wide state of the native operators: the thread limit, and memory helpers.
#include <atomic>
#include <cstdlib>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "include/vec.h"

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
