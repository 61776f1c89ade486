// Team: the threads that help the calling thread to compute. For a while, a waiting thread looks for work again and
// again, since waking a thread takes longer than many products. In between, it gives way to any other thread that could
// run.
//
// A team of OpenMP can only wait busily or sleep. If its threads wait busily, one other busy process on the machine
// makes a step several times longer: the thread for which they wait has no core.
//
// A guest is a thread on a CPU that another worker lends (lent_cpus.h). It takes a part only as long as the CPU is lent.

#pragma once

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "lent_cpus.h"

class Team {
  public:
    using Run = void (*)(const void *call, int64_t part);
    static constexpr int64_t MAX_PARTS = 1024, MAX_GUESTS = 256;

    // The team of this thread. It lasts as long as the thread.
    static Team &mine() {
        static thread_local Team team;
        return team;
    }

    // How many guests will help in the next call of `run`: borrows at most `most` CPUs that are lent at present, except
    // those on which no thread of this process may run.
    int64_t invite_guests(int64_t most = MAX_GUESTS) {
        LentCpus &lent = LentCpus::of_process();
        num_invited_ = 0;
        if (!lent.is_in_step()) return 0;
        for (int64_t i = 0; i < std::min(lent.num_others(), MAX_GUESTS) && num_invited_ < most; ++i)
            if (guests_[i].state != Guest::CANNOT_COME && lent.borrow(i) && has_guest(i))
                invited_[num_invited_++] = &guests_[i];
        return num_invited_;
    }

    // Calls run(call, part) for each part of 0..num_parts - 1, in this thread, in num_threads - 1 others and in the
    // invited guests, and returns once all have returned. Each thread begins with the part of its own number, whose
    // memory may be near it. Then it takes parts that no thread has begun. So no thread waits for a thread that has no
    // core at present.
    void run(Run run, const void *call, int64_t num_parts, int num_threads) {
        while (num_helpers_ < std::min<int64_t>(num_threads, MAX_PARTS) - 1 && add_helper()) continue;
        run_ = run, call_ = call;
        unfinished_.store(static_cast<uint32_t>(num_parts), std::memory_order_relaxed);
        const uint64_t number = last_.load(std::memory_order_relaxed).number + 1;
        last_.store({number, static_cast<uint64_t>(num_parts)}, std::memory_order_release);
        begins_.send(static_cast<uint32_t>(number));
        for (int64_t i = 0; i < num_invited_; ++i) invited_[i]->begins.send(static_cast<uint32_t>(number));
        num_invited_ = 0;
        take_parts(0);
        for (uint32_t remaining; (remaining = unfinished_.load(std::memory_order_acquire)) > 0;) {
            if (changes(unfinished_, remaining)) continue;
            is_caller_asleep_.store(1);
            futex(unfinished_, FUTEX_WAIT_PRIVATE, remaining);
            is_caller_asleep_.store(0);
        }
    }

    // Whether this thread computes a part at present. A call from within a part is computed by this thread alone.
    static bool is_in_part() { return is_in_part_; }

    // Whether this thread is a guest whose CPU is no longer lent. Long parts ask this from time to time.
    static bool must_leave() { return guest_ >= 0 && !LentCpus::of_process().may_use(guest_); }

    ~Team() {
        if (getpid() != process_) return;  // forked: only the caller's thread is in this process
        is_over_.store(true);
        begins_.send(begins_.number.load() + 1);
        for (int64_t i = 0; i < num_helpers_; ++i) pthread_join(helpers_[i].thread, nullptr);
        for (Guest &guest : guests_) {
            if (guest.state != Guest::IS_HERE) continue;
            guest.begins.send(guest.begins.number.load() + 1);
            pthread_join(guest.thread, nullptr);
        }
    }

  private:
    using Word = std::atomic<uint32_t>;
    static constexpr int64_t AWAKE_NS = 2'000'000;  // longer than the time between two steps of a decode worker

    struct Call {
        uint64_t number : 48, num_parts : 16;  // read and written together
    };
    // Tells waiting threads that a call begins.
    struct Signal {
        alignas(64) Word number{0};  // the low bits of the call's number
        Word num_asleep{0};

        void send(uint32_t new_number) {
            number.store(new_number);
            if (num_asleep.load() > 0) futex(number, FUTEX_WAKE_PRIVATE, INT32_MAX);
        }
    };
    struct Helper {
        Team *team;
        int64_t own_part;
        pthread_t thread;
    };
    struct Guest {
        enum State { IS_NEW, IS_HERE, CANNOT_COME } state = IS_NEW;
        Team *team = nullptr;
        int64_t index = 0;  // of its CPU in LentCpus
        pthread_t thread;
        Signal begins;
    };

    bool add_helper() {
        const auto main = [](void *self) -> void * {
            const Helper &helper = *static_cast<Helper *>(self);
            helper.team->help(helper.own_part, helper.team->begins_);
            return nullptr;
        };
        Helper &helper = helpers_[num_helpers_];
        helper.team = this, helper.own_part = num_helpers_ + 1;
        if (pthread_create(&helper.thread, nullptr, main, &helper) != 0) return false;
        ++num_helpers_;
        return true;
    }

    // Whether there is a guest for this CPU; the first call makes the guest.
    bool has_guest(int64_t index) {
        Guest &guest = guests_[index];
        if (guest.state != Guest::IS_NEW) return guest.state == Guest::IS_HERE;
        const auto main = [](void *self) -> void * {
            Guest &guest = *static_cast<Guest *>(self);
            guest_ = guest.index;
            guest.team->help(-1 - guest.index, guest.begins);
            return nullptr;
        };
        guest.team = this, guest.index = index;
        cpu_set_t cpu;
        CPU_ZERO(&cpu);
        CPU_SET(LentCpus::of_process().other(index), &cpu);
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        const bool is_made = pthread_attr_setaffinity_np(&attributes, sizeof cpu, &cpu) == 0 &&
                             pthread_create(&guest.thread, &attributes, main, &guest) == 0;
        pthread_attr_destroy(&attributes);
        guest.state = is_made ? Guest::IS_HERE : Guest::CANNOT_COME;
        return is_made;
    }

    // The loop of a helper, or of a guest. A guest without a lent CPU sleeps at once.
    void help(int64_t own_part, Signal &begins) {
        for (uint32_t seen = 0; !is_over_.load();) {
            const uint32_t number = begins.number.load();
            if (number != seen) {
                seen = number;
                take_parts(own_part);
            } else if (!changes(begins.number, seen)) {
                begins.num_asleep.fetch_add(1);
                futex(begins.number, FUTEX_WAIT_PRIVATE, seen);
                begins.num_asleep.fetch_sub(1);
            }
        }
    }

    // Computes parts that are free. A part is free if it was last taken in an earlier call. A thread that has taken a
    // part may read the call, which does not change until the part is finished. A guest's own part is negative: it
    // counts from the last part.
    void take_parts(int64_t own_part) {
        const Call last = last_.load(std::memory_order_acquire);
        const int64_t num_parts = last.num_parts, first = own_part < 0 ? num_parts + own_part % num_parts : own_part;
        for (int64_t i = 0; i < num_parts && !must_leave(); ++i) {
            const int64_t part = (first + i) % num_parts;
            uint64_t taken_in = taken_in_[part].load(std::memory_order_relaxed);
            if (taken_in >= last.number) continue;
            if (!taken_in_[part].compare_exchange_strong(taken_in, last.number)) continue;
            const int64_t begin = guest_ < 0 ? 0 : monotonic_ns();
            is_in_part_ = true;
            run_(call_, part);
            is_in_part_ = false;
            if (guest_ >= 0) LentCpus::of_process().add_borrowed(monotonic_ns() - begin);
            if (unfinished_.fetch_sub(1) == 1 && is_caller_asleep_.load()) futex(unfinished_, FUTEX_WAKE_PRIVATE, 1);
        }
    }

    // Waits a short time; returns whether the word has changed before this thread had to leave.
    static bool changes(const Word &word, uint32_t from) {
        const int64_t begin = monotonic_ns();
        do {
            for (int i = 0; i < 64; ++i) {
                if (word.load(std::memory_order_acquire) != from) return true;
                relax();
            }
            if (must_leave()) return false;
            sched_yield();
        } while (monotonic_ns() - begin < AWAKE_NS);
        return false;
    }

    static void relax() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#else
        __asm__ volatile("yield");
#endif
    }

    static void futex(const Word &word, int what, uint32_t value) {
        syscall(SYS_futex, &word, what, value, nullptr, nullptr, 0);
    }

    inline static thread_local bool is_in_part_ = false;
    inline static thread_local int64_t guest_ = -1;  // this thread's index among guests; -1: it is no guest
    alignas(64) std::atomic<Call> last_{Call{0, 0}};
    Signal begins_;
    alignas(64) Word unfinished_{0};
    alignas(64) Word is_caller_asleep_{0};
    std::atomic<bool> is_over_{false};
    Run run_ = nullptr;
    const void *call_ = nullptr;
    const pid_t process_ = getpid();
    int64_t num_helpers_ = 0;
    Helper helpers_[MAX_PARTS - 1];
    int64_t num_invited_ = 0;
    Guest *invited_[MAX_GUESTS];
    Guest guests_[MAX_GUESTS];
    alignas(64) std::atomic<uint64_t> taken_in_[MAX_PARTS] = {};  // the number of the call in which each part was taken last
};
