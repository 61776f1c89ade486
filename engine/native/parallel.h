// parallel_for: equal parts of a range, computed by the threads of a Team.

#pragma once

#include <algorithm>
#include <cstdint>

#include "team.h"

// Calls `work(begin, end)` for equal parts of 0..count, one for each of at most `num_threads` threads. All
// parts except the last are multiples of `grain`.
template <typename Work>
void parallel_for(int64_t count, int64_t grain, int num_threads, const Work &work) {
    const int64_t num_grains = (count + grain - 1) / grain;
    const int64_t num_parts = std::min<int64_t>({num_threads, num_grains, Team::MAX_PARTS});
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
