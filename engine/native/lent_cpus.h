// LentCpus: while a worker computes nothing, the other workers of its fleet on this machine compute with its CPUs.

#pragma once

#include <errno.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

inline int64_t monotonic_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// A CPU's entry in memory that these workers share. At first it consists of zeros: no worker lends the CPU.
struct alignas(64) LentCpu {
    std::atomic<int64_t> idle_since_ns;  // 0: its worker computes
    std::atomic<int64_t> borrower;       // the worker that computes with it, or 0
};
static_assert(std::atomic<int64_t>::is_always_lock_free, "other processes use the same memory");

// What this process lends and borrows. Other processes may die at any time: a worker that begins a step takes back its
// CPUs, even if another worker has borrowed them.
class LentCpus {
  public:
    static constexpr int64_t MOST_CPUS = 1024;

    static LentCpus &of_process() {
        static LentCpus lent;
        return lent;
    }

    // `file`: MOST_CPUS entries. Lends the CPUs `own` between steps, from the first `end_step` on, and borrows the CPUs
    // `others` in steps. Call this once in a process. Returns an error number if the file cannot be mapped.
    int open(int file, const int64_t *own, int64_t num_own, const int64_t *others, int64_t num_others) {
        void *table = mmap(nullptr, MOST_CPUS * sizeof(LentCpu), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (table == MAP_FAILED) return errno;
        table_ = static_cast<LentCpu *>(table);
        std::copy_n(own, num_own_ = num_own, own_);
        std::copy_n(others, num_others_ = num_others, others_);
        self_ = own[0] + 1;
        take_back();
        return 0;
    }

    void begin_step() {
        take_back();
        is_in_step_.store(num_others_ > 0);
    }

    void end_step() {
        is_in_step_.store(false);
        for (int64_t i = 0; i < num_others_; ++i) {
            int64_t borrower = self_;
            table_[others_[i]].borrower.compare_exchange_strong(borrower, 0);
        }
        for (int64_t i = 0; i < num_own_; ++i) table_[own_[i]].idle_since_ns.store(monotonic_ns());
    }

    bool is_in_step() const { return is_in_step_.load(std::memory_order_relaxed); }
    int64_t num_others() const { return num_others_; }
    int64_t other(int64_t i) const { return others_[i]; }

    // Borrows the CPU until the end of the step, if it is lent and no other worker has borrowed it.
    bool borrow(int64_t i) {
        LentCpu &cpu = table_[others_[i]];
        const int64_t idle_since_ns = cpu.idle_since_ns.load(std::memory_order_relaxed);
        if (idle_since_ns == 0) return false;
        int64_t borrower = cpu.borrower.load(std::memory_order_relaxed);
        if (borrower == self_) return true;
        return borrower == 0 && monotonic_ns() - idle_since_ns >= LENT_AFTER_NS &&
               cpu.borrower.compare_exchange_strong(borrower, self_);
    }

    // Whether a CPU that was borrowed is still lent to this process.
    bool may_use(int64_t i) const {
        const LentCpu &cpu = table_[others_[i]];
        return cpu.idle_since_ns.load(std::memory_order_relaxed) != 0 &&
               cpu.borrower.load(std::memory_order_relaxed) == self_;
    }

    void add_borrowed(int64_t ns) { borrowed_ns_.fetch_add(ns, std::memory_order_relaxed); }
    int64_t borrowed_ns() const { return borrowed_ns_.load(std::memory_order_relaxed); }

  private:
    static constexpr int64_t LENT_AFTER_NS = 1'000'000;  // longer than the time between two steps of a busy worker

    void take_back() {
        for (int64_t i = 0; i < num_own_; ++i) {
            table_[own_[i]].idle_since_ns.store(0);
            table_[own_[i]].borrower.store(0);
        }
    }

    LentCpu *table_ = nullptr;  // never unmapped, since guests may read it at any time
    int64_t own_[MOST_CPUS], others_[MOST_CPUS];
    int64_t num_own_ = 0, num_others_ = 0, self_ = 0;
    std::atomic<bool> is_in_step_{false};
    std::atomic<int64_t> borrowed_ns_{0};  // the time for which borrowed CPUs computed
};
