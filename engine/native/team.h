// Team: the threads that compute with the thread that calls. Waiting threads look for work again and again for a while,
// since waking a thread takes longer than many products, but each time give way to any other thread that could run.
//
// A team of OpenMP can only wait busily or sleep. Where its threads wait busily, one other busy process on the machine
// makes a step ten times longer: the thread that is waited for has no core.

#pragma once

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

class Team {
  public:
    using Run = void (*)(const void *call, int64_t part);

    // The team of this thread. It lasts as long as the thread.
    static Team &mine() {
        static thread_local Team team;
        return team;
    }

    // Calls run(call, part) for each part of 0..num_parts - 1, in this thread and in num_threads - 1 others, and returns
    // once all have returned. A thread that has no core at present takes no part, so nobody waits for it.
    void run(Run run, const void *call, int64_t num_parts, int num_threads) {
        while (num_helpers_ < num_threads - 1 && add_helper()) continue;
        run_ = run, call_ = call;
        unfinished_.store(static_cast<uint32_t>(num_parts), std::memory_order_relaxed);
        const uint32_t number = number_.load(std::memory_order_relaxed) + 1;
        next_.store(place(number, static_cast<uint64_t>(num_parts)), std::memory_order_release);
        number_.store(number);
        if (num_asleep_.load() > 0) futex(number_, FUTEX_WAKE_PRIVATE, INT32_MAX);
        take_parts(number);
        for (uint32_t left; (left = unfinished_.load(std::memory_order_acquire)) > 0;) {
            if (changes(unfinished_, left)) continue;
            is_caller_asleep_.store(1);
            futex(unfinished_, FUTEX_WAIT_PRIVATE, left);
            is_caller_asleep_.store(0);
        }
    }

    ~Team() {
        if (getpid() != process_) return;  // forked: only the caller's thread is in this process
        is_over_.store(true);
        number_.fetch_add(1);
        futex(number_, FUTEX_WAKE_PRIVATE, INT32_MAX);
        for (int i = 0; i < num_helpers_; ++i) pthread_join(helpers_[i], nullptr);
    }

  private:
    using Word = std::atomic<uint32_t>;
    static constexpr int MAX_HELPERS = 1023;
    static constexpr int64_t AWAKE_NS = 2'000'000;  // longer than what lies between two steps of a decode worker

    // A call's number, above how many of its parts nobody has taken yet.
    static uint64_t place(uint32_t number, uint64_t num_parts) { return uint64_t{number} << 32 | num_parts; }

    bool add_helper() {
        if (num_helpers_ == MAX_HELPERS) return false;
        const auto main = [](void *team) -> void * {
            static_cast<Team *>(team)->help();
            return nullptr;
        };
        if (pthread_create(&helpers_[num_helpers_], nullptr, main, this) != 0) return false;
        ++num_helpers_;
        return true;
    }

    void help() {
        for (uint32_t seen = 0; !is_over_.load();) {
            const uint32_t number = number_.load();
            if (number != seen) {
                take_parts(seen = number);
            } else if (!changes(number_, seen)) {
                num_asleep_.fetch_add(1);
                futex(number_, FUTEX_WAIT_PRIVATE, seen);
                num_asleep_.fetch_sub(1);
            }
        }
    }

    // The call stays what it is while one of its parts is unfinished, so it may be read once a part is taken.
    void take_parts(uint32_t number) {
        uint64_t next = next_.load(std::memory_order_acquire);
        while (next >> 32 == number && (next & UINT32_MAX) > 0) {
            if (!next_.compare_exchange_weak(next, next - 1, std::memory_order_acquire)) continue;
            run_(call_, static_cast<int64_t>((next & UINT32_MAX) - 1));
            if (unfinished_.fetch_sub(1) == 1 && is_caller_asleep_.load()) futex(unfinished_, FUTEX_WAKE_PRIVATE, 1);
            next = next_.load(std::memory_order_acquire);
        }
    }

    // Whether the word changes soon.
    static bool changes(const Word &word, uint32_t from) {
        const int64_t begin = now_ns();
        do {
            for (int i = 0; i < 64; ++i) {
                if (word.load(std::memory_order_acquire) != from) return true;
                relax();
            }
            sched_yield();
        } while (now_ns() - begin < AWAKE_NS);
        return false;
    }

    static void relax() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#else
        __asm__ volatile("yield");
#endif
    }

    static int64_t now_ns() {
        timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
    }

    static void futex(const Word &word, int what, uint32_t value) {
        syscall(SYS_futex, &word, what, value, nullptr, nullptr, 0);
    }

    alignas(64) std::atomic<uint64_t> next_{0};
    alignas(64) Word number_{0};  // of the last call
    alignas(64) Word unfinished_{0};
    alignas(64) Word num_asleep_{0};
    Word is_caller_asleep_{0};
    std::atomic<bool> is_over_{false};
    Run run_ = nullptr;
    const void *call_ = nullptr;
    const pid_t process_ = getpid();
    int num_helpers_ = 0;
    pthread_t helpers_[MAX_HELPERS];
};
