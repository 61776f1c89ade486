// Team: the threads that help the calling thread to compute. For a while, a waiting thread looks for work again and
// again, since waking a thread takes longer than many products. In between, it gives way to any other thread that could
// run.
//
// A team of OpenMP can only wait busily or sleep. If its threads wait busily, one other busy process on the machine
// makes a step several times longer: the thread for which they wait has no core.

#pragma once

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

class Team {
  public:
    using Run = void (*)(const void *call, int64_t part);
    static constexpr int64_t MAX_PARTS = 1024;

    // The team of this thread. It lasts as long as the thread.
    static Team &mine() {
        static thread_local Team team;
        return team;
    }

    // Calls run(call, part) for each part of 0..num_parts - 1, in this thread and in num_threads - 1 others, and
    // returns once all have returned. Each thread begins with the part of its own number, whose memory may be near it.
    // Then it takes parts that no thread has begun. So no thread waits for a thread that has no core at present.
    void run(Run run, const void *call, int64_t num_parts, int num_threads) {
        while (num_helpers_ < std::min<int64_t>(num_threads, MAX_PARTS) - 1 && add_helper()) continue;
        run_ = run, call_ = call;
        unfinished_.store(static_cast<uint32_t>(num_parts), std::memory_order_relaxed);
        const uint64_t number = last_.load(std::memory_order_relaxed).number + 1;
        last_.store({number, static_cast<uint64_t>(num_parts)}, std::memory_order_release);
        begun_.store(static_cast<uint32_t>(number));
        if (num_asleep_.load() > 0) futex(begun_, FUTEX_WAKE_PRIVATE, INT32_MAX);
        take_parts(0);
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
        begun_.fetch_add(1);
        futex(begun_, FUTEX_WAKE_PRIVATE, INT32_MAX);
        for (int64_t i = 0; i < num_helpers_; ++i) pthread_join(helpers_[i].thread, nullptr);
    }

  private:
    using Word = std::atomic<uint32_t>;
    static constexpr int64_t AWAKE_NS = 2'000'000;  // longer than the time between two steps of a decode worker

    struct Call {
        uint64_t number : 48, num_parts : 16;  // read and written together
    };
    struct Helper {
        Team *team;
        int64_t own_part;
        pthread_t thread;
    };

    bool add_helper() {
        const auto main = [](void *self) -> void * {
            const Helper &helper = *static_cast<Helper *>(self);
            helper.team->help(helper.own_part);
            return nullptr;
        };
        Helper &helper = helpers_[num_helpers_];
        helper.team = this, helper.own_part = num_helpers_ + 1;
        if (pthread_create(&helper.thread, nullptr, main, &helper) != 0) return false;
        ++num_helpers_;
        return true;
    }

    void help(int64_t own_part) {
        for (uint32_t seen = 0; !is_over_.load();) {
            const uint32_t begun = begun_.load();
            if (begun != seen) {
                seen = begun;
                take_parts(own_part);
            } else if (!changes(begun_, seen)) {
                num_asleep_.fetch_add(1);
                futex(begun_, FUTEX_WAIT_PRIVATE, seen);
                num_asleep_.fetch_sub(1);
            }
        }
    }

    // A part is free if it was last taken in an earlier call. A thread that has taken a part may read the call, which
    // does not change until the part is finished.
    void take_parts(int64_t own_part) {
        const Call last = last_.load(std::memory_order_acquire);
        const int64_t num_parts = last.num_parts;
        for (int64_t i = 0; i < num_parts; ++i) {
            const int64_t part = (own_part + i) % num_parts;
            uint64_t taken_in = taken_in_[part].load(std::memory_order_relaxed);
            if (taken_in >= last.number) continue;
            if (!taken_in_[part].compare_exchange_strong(taken_in, last.number)) continue;
            run_(call_, part);
            if (unfinished_.fetch_sub(1) == 1 && is_caller_asleep_.load()) futex(unfinished_, FUTEX_WAKE_PRIVATE, 1);
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

    alignas(64) std::atomic<Call> last_{Call{0, 0}};
    Word begun_{0};  // the low bits of the call's number, for threads that wait
    alignas(64) Word unfinished_{0};
    alignas(64) Word num_asleep_{0};
    Word is_caller_asleep_{0};
    std::atomic<bool> is_over_{false};
    Run run_ = nullptr;
    const void *call_ = nullptr;
    const pid_t process_ = getpid();
    int64_t num_helpers_ = 0;
    Helper helpers_[MAX_PARTS - 1];
    alignas(64) std::atomic<uint64_t> taken_in_[MAX_PARTS] = {};  // the number of the call in which each part was taken last
};
