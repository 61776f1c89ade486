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
    const unsigned wanted = static_cast<unsigned>(std::min<int64_t>(num_threads, num_grains));
    if (wanted <= 1) {
        if (count > 0) work(int64_t{0}, count);
        return;
    }
    struct Call {
        const Work *work;
        int64_t count, grain, num_grains;
    } call{&work, count, grain, num_grains};
    GOMP_parallel(
        [](void *data) {
            const Call &c = *static_cast<const Call *>(data);
            const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
            const int64_t begin = c.num_grains * thread / threads * c.grain;
            const int64_t end = std::min(c.num_grains * (thread + 1) / threads * c.grain, c.count);
            if (begin < end) (*c.work)(begin, end);
        },
        &call, wanted, 0);
}
