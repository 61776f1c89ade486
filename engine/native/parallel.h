// parallel_for and for_each: a range, computed by the threads of a Team and by its guests, in equal parts or one by one.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <numeric>
#include <vector>

#include "team.h"

// With guests, work is cut into at least this many parts. A worker that takes back its CPU waits for a guest's part,
// so a part must take less than a millisecond. The work reads or writes `num_bytes`, and multiplies `num_products`
// numbers.
inline int64_t parts_for_guests(int64_t num_bytes, int64_t num_products = 0) {
    constexpr int64_t PART_PRODUCTS = 8'000'000, PART_BYTES = 2'000'000;
    return std::max(num_products / PART_PRODUCTS, num_bytes / PART_BYTES);
}

// Calls `work(begin, end)` for equal parts of 0..count: one part for each of at most `num_threads` threads, and one
// for each guest. If there are guests, there are at least `parts_with_guests` parts. All parts except the last are
// multiples of `grain`. A call from within a part of another call computes everything in this thread.
template <typename Work>
void parallel_for(int64_t count, int64_t grain, int num_threads, const Work &work, int64_t parts_with_guests = 0) {
    const int64_t num_grains = (count + grain - 1) / grain;
    int64_t most_parts = num_threads;
    if (Team::is_in_part()) most_parts = 1;
    else if (num_grains > num_threads)
        if (const int64_t num_guests = Team::mine().invite_guests(num_grains - num_threads); num_guests > 0)
            most_parts = std::max(num_threads + num_guests, parts_with_guests);
    const int64_t num_parts = std::min({most_parts, num_grains, Team::MAX_PARTS});
    if (num_parts <= 1) {
        if (count > 0) work(int64_t{0}, count);
        return;
    }
    struct Call {
        const Work *work;
        int64_t count, grain, num_grains, num_parts;
    } call{&work, count, grain, num_grains, num_parts};
    Team::mine().run(
        [](const void *data, int64_t part) {
            const Call &c = *static_cast<const Call *>(data);
            const int64_t begin = c.num_grains * part / c.num_parts * c.grain;
            const int64_t end = std::min(c.num_grains * (part + 1) / c.num_parts * c.grain, c.count);
            if (begin < end) (*c.work)(begin, end);
        },
        &call, num_parts, num_threads);
}

// Calls `work(i)` for each i of 0..count - 1, and again for an i for which it returned false. Each thread takes the
// next i that no thread has taken; a guest takes one only as long as its CPU is lent. If a guest must leave while it
// works, its `work` may return false: then a thread begins again with this i. Do not call this within a part of
// another call: a guest that must leave there would skip all that follows.
template <typename Work>
void for_each(int64_t count, int num_threads, const Work &work) {
    std::vector<int64_t> waiting(count), unfinished;
    std::iota(waiting.begin(), waiting.end(), 0);
    for (std::mutex mutex; !waiting.empty(); waiting.swap(unfinished), unfinished.clear()) {
        const int64_t num_waiting = waiting.size();
        std::atomic<int64_t> next{0};
        const auto compute = [&](int64_t, int64_t) {
            for (int64_t i; !Team::must_leave() && (i = next.fetch_add(1, std::memory_order_relaxed)) < num_waiting;) {
                if (work(waiting[i])) continue;
                const std::lock_guard<std::mutex> lock(mutex);
                unfinished.push_back(waiting[i]);
            }
        };
        parallel_for(num_waiting, 1, num_threads, compute);
        // Guests, even late ones of a former call, may have taken every part and then left. This thread computes the
        // rest.
        compute(0, 0);
    }
}
