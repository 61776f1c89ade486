// parallel_for: the threads of torch's own OpenMP runtime, without compiler support for OpenMP.
//
// A runtime of our own would keep a second set of threads that wait busily beside torch's.

#pragma once

#include <algorithm>
#include <cstdint>

extern "C" {
void GOMP_parallel(void (*run)(void *), void *data, unsigned num_threads, unsigned flags);
int omp_get_thread_num();
int omp_get_num_threads();
}

// Calls `work(begin, end)` for equal parts of 0..count, one for each of at most `num_threads` threads. The parts are
// multiples of `grain`, but for the last.
template <typename Work>
void parallel_for(int64_t count, int64_t grain, int num_threads, const Work &work) {
    const int64_t num_grains = (count + grain - 1) / grain;
    const int64_t num_parts = std::min<int64_t>(num_threads, num_grains);
    if (num_parts <= 1) {
        if (count > 0) work(int64_t{0}, count);
        return;
    }
    struct Call {
        const Work *work;
        int64_t count, grain, num_grains, num_parts;
    } call{&work, count, grain, num_grains, num_parts};
    // All threads take part, if only to end at once: the runtime ends threads that a smaller team leaves out, and the
    // next larger one would have to create them again.
    GOMP_parallel(
        [](void *data) {
            const Call &c = *static_cast<const Call *>(data);
            const int64_t parts = std::min<int64_t>(omp_get_num_threads(), c.num_parts), part = omp_get_thread_num();
            if (part >= parts) return;
            const int64_t begin = c.num_grains * part / parts * c.grain;
            const int64_t end = std::min(c.num_grains * (part + 1) / parts * c.grain, c.count);
            if (begin < end) (*c.work)(begin, end);
        },
        &call, static_cast<unsigned>(num_threads), 0);
}
