// The functions of engine/lent_cpus.py; lent_cpus.h explains them.

#include "lent_cpus.h"

extern "C" {

int64_t baton_open_lent_cpus(int64_t file, const int64_t *own, int64_t num_own, const int64_t *others,
                             int64_t num_others) {
    return LentCpus::of_process().open(static_cast<int>(file), own, num_own, others, num_others);
}

void baton_begin_step() { LentCpus::of_process().begin_step(); }

void baton_end_step() { LentCpus::of_process().end_step(); }

// For how long CPUs of other processes have computed for this process, summed over these CPUs.
int64_t baton_borrowed_ns() { return LentCpus::of_process().borrowed_ns(); }

}  // extern "C"
