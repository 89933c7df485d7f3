// The threads of the native operators: a pool that wakes fast, spins briefly, and never waits for a thread that has not
// begun. Other programs on the machine, and a thread that the system has put aside, cost speed only.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

#include "include/vec.h"

namespace octavo {

static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Idle threads look for work this long before they sleep: longer than the host's work between two operators of a step.
// Gaps within an operator are shorter than the first part of it, after which they offer their core to others.
constexpr auto SPIN = std::chrono::microseconds(100), INSIST = std::chrono::microseconds(10);

constexpr int MAX_THREADS = 256;

// The tasks of a job that one thread takes first.
struct alignas(64) Share {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
};

// One job at a time. `open_` says that the job's fields may be read; a worker counts itself in `inside_` before it looks
// at `open_`, and the owner writes the fields only while the job is closed and nobody is inside.
class Pool {
  public:
    void run(int threads, int64_t count, TaskFunction function, const void* context) {
        std::unique_lock<std::mutex> owner(owner_, std::try_to_lock);
        if (!owner) {  // another caller's job runs: this one goes on alone, with the same bits
            for (int64_t task = 0; task < count; ++task) function(context, task);
            return;
        }
        grow(threads - 1);
        function_ = function, context_ = context, num_shares_ = threads;
        for (int t = 0; t < threads; ++t) {
            shares_[t].next.store(count * t / threads, std::memory_order_relaxed);
            shares_[t].end = count * (t + 1) / threads;
        }
        open_.store(true);
        epoch_.fetch_add(1);
        if (sleeping_.load() > 0) {
            std::lock_guard<std::mutex> lock(sleep_);
            wake_.notify_all();
        }
        drain(0);
        open_.store(false);
        for (int spins = 0; inside_.load() != 0; ++spins) {
            if (spins < 2000) relax();
            else std::this_thread::yield();
        }
    }

  private:
    void grow(int workers) {
        for (; num_workers_ < workers; ++num_workers_)
            std::thread([this, index = num_workers_] { work(index); }).detach();
    }

    // A thread walks a run of neighbours, as the memory's prefetchers like it, then helps with what the others left.
    void drain(int self) {
        for (int i = 0; i < num_shares_; ++i) {
            Share& share = shares_[(self + i) % num_shares_];
            for (;;) {
                int64_t task = share.next.fetch_add(1, std::memory_order_relaxed);
                if (task >= share.end) break;
                function_(context_, task);
            }
        }
    }

    void work(int index) {
        for (uint64_t seen = 0;;) {
            seen = wait(seen);
            inside_.fetch_add(1);
            if (open_.load() && index + 1 < num_shares_) drain(index + 1);
            inside_.fetch_sub(1);
        }
    }

    uint64_t wait(uint64_t seen) {
        const auto begin = std::chrono::steady_clock::now();
        for (int spins = 1;; ++spins) {
            uint64_t epoch = epoch_.load(std::memory_order_acquire);
            if (epoch != seen) return epoch;
            relax();
            if (spins % 64 != 0) continue;
            const auto idle = std::chrono::steady_clock::now() - begin;
            if (idle > SPIN) break;
            if (idle > INSIST) std::this_thread::yield();
        }
        std::unique_lock<std::mutex> lock(sleep_);
        sleeping_.fetch_add(1);
        wake_.wait(lock, [&] { return epoch_.load() != seen; });
        sleeping_.fetch_sub(1);
        return epoch_.load();
    }

    std::mutex owner_, sleep_;
    std::condition_variable wake_;
    std::atomic<uint64_t> epoch_{0};
    std::atomic<int> inside_{0}, sleeping_{0};
    std::atomic<bool> open_{false};
    int num_workers_ = 0;
    TaskFunction function_ = nullptr;
    const void* context_ = nullptr;
    int num_shares_ = 0;
    Share shares_[MAX_THREADS];
};

static std::atomic<Pool*> pool{nullptr};

// Never destroyed: detached workers may outlive static destructors. A child after fork has no workers and starts anew.
static Pool* current_pool() {
    Pool* current = pool.load(std::memory_order_acquire);
    if (current != nullptr) return current;
    static std::mutex making;
    std::lock_guard<std::mutex> lock(making);
    if (pool.load() == nullptr) {
        pool.store(new Pool);
#if defined(__unix__) || defined(__APPLE__)
        static bool registered = pthread_atfork(nullptr, nullptr, [] { pool.store(nullptr); }) == 0;
        (void)registered;
#endif
    }
    return pool.load();
}

void run_tasks(int threads, int64_t count, TaskFunction function, const void* context) {
    current_pool()->run(int(std::min<int64_t>({threads, count, MAX_THREADS})), count, function, context);
}

}  // namespace octavo
