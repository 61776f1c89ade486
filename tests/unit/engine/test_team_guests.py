"""Guests of a Team: parts that they leave are still computed, and no more guests are invited than there are parts."""

import os
import subprocess
from pathlib import Path

import pytest

from engine.native.compilers import compilers
from engine.native.library import SOURCES, native_library

pytestmark = pytest.mark.skipif(
    native_library() is None or not compilers(os.environ), reason="needs a C++ compiler"
)

LEFT_ITEMS = """
// A guest that is late for the second call wakes in the third. So two guests take both parts of the third call, while
// its caller has no CPU. Before they begin, their CPU is taken back.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>

static int clock_of_test(clockid_t clock, timespec *now);
template <typename... Arguments>
static long syscall_of_test(long number, const void *word, int what, Arguments... arguments);

#define clock_gettime clock_of_test
#define syscall syscall_of_test
#include "parallel.h"
#undef clock_gettime
#undef syscall

static LentCpu *table;
static std::atomic<int> num_waiting{0}, num_began{0};
static std::atomic<bool> is_rehearsed{false}, is_second_late{false}, is_second_held{false};
static std::atomic<pid_t> second{0};  // the guest that was made last
static const pid_t caller = gettid();

// A guest reads the clock when it has taken a part.
static int clock_of_test(clockid_t clock, timespec *now) {
    if (is_rehearsed && gettid() != caller && ++num_began <= 2) {
        while (num_began < 2) sched_yield();
        table[0].idle_since_ns = 0;
    }
    return clock_gettime(clock, now);
}

// The caller wakes guests just before it takes parts itself.
template <typename... Arguments>
static long syscall_of_test(long number, const void *word, int what, Arguments... arguments) {
    if (gettid() == caller) {
        const long result = syscall(number, word, what, arguments...);
        if (is_rehearsed && is_second_late.exchange(false))
            while (num_began < 2 || num_waiting < 2) sched_yield();
        return result;
    }
    for (pid_t last = second; last < gettid() && !second.compare_exchange_weak(last, gettid());) continue;
    ++num_waiting;
    const long result = syscall(number, word, what, arguments...);
    --num_waiting;
    for (; is_second_late && gettid() == second; sched_yield()) is_second_held = true;
    return result;
}

int main() {
    alarm(60);
    const int file = memfd_create("cpus", 0);
    const size_t size = LentCpus::MOST_CPUS * sizeof(LentCpu);
    if (ftruncate(file, size) != 0) return 1;
    table = static_cast<LentCpu *>(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    const int64_t own[] = {1}, others[] = {0, 0};
    LentCpus &lent = LentCpus::of_process();
    if (lent.open(file, own, 1, others, 2) != 0) return 1;
    lent.begin_step();
    table[0].idle_since_ns = 1;
    for_each(3, 1, [](int64_t) { return true; });
    table[0].idle_since_ns = 0;
    while (num_waiting < 2) sched_yield();
    is_second_late = true;
    table[0].idle_since_ns = 1;
    for_each(3, 1, [](int64_t) { return true; });
    table[0].idle_since_ns = 0;
    while (!is_second_held || num_waiting < 1) sched_yield();
    is_rehearsed = true;
    table[0].idle_since_ns = 1;
    std::atomic<int> num_by_caller{0}, num_by_guests{0};
    for_each(2, 1, [&](int64_t) {
        ++(gettid() == caller ? num_by_caller : num_by_guests);
        return true;
    });
    std::printf("the caller computed %d items, guests %d", num_by_caller.load(), num_by_guests.load());
}
"""


INVITATIONS = """
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>

#include "team.h"

int main() {
    const int file = memfd_create("cpus", 0);
    const size_t size = LentCpus::MOST_CPUS * sizeof(LentCpu);
    if (ftruncate(file, size) != 0) return 1;
    const int64_t own[] = {1023}, others[] = {HERE, HERE, HERE};
    LentCpus &lent = LentCpus::of_process();
    if (lent.open(file, own, 1, others, 3) != 0) return 1;
    static_cast<LentCpu *>(mmap(nullptr, size, PROT_WRITE, MAP_SHARED, file, 0))[HERE].idle_since_ns = 1;
    lent.begin_step();
    for (int64_t most : {-1, 0, 1, 2, 9})
        std::printf("%ld ", static_cast<long>(Team::mine().invite_guests(most)));
}
"""


def output_of(text: str, folder: Path) -> str:
    """What this C++ program prints."""
    source, program = folder / "program.cpp", folder / "program"
    source.write_text(text)
    compiler = compilers(os.environ)[0]
    flags = ("-std=c++17", "-pthread", f"-I{SOURCES}")
    subprocess.run([*compiler, *flags, str(source), "-o", str(program)], check=True)
    return subprocess.run([program], check=True, capture_output=True, text=True).stdout


def test_the_caller_computes_the_items_that_all_guests_have_left(tmp_path: Path) -> None:
    assert output_of(LEFT_ITEMS, tmp_path) == "the caller computed 2 items, guests 0"


def test_no_more_guests_are_invited_than_there_are_parts_for_them(tmp_path: Path) -> None:
    """Each guest would be woken, which takes longer than many products."""
    cpu = max(os.sched_getaffinity(0))
    assert output_of(INVITATIONS.replace("HERE", str(cpu)), tmp_path) == "0 0 1 2 3 "
