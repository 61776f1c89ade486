"""What code costs, in figures that a slow or a busy machine does not change."""

import gc
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType

STEPS, TRIES = 8, 5


def calls_in(run: Callable[[], object]) -> Counter[str]:
    """How often each Python function was called while this ran."""
    counts: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            counts[frame.f_code.co_qualname] += 1

    former = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(former)
    return counts


def thread_s(run: Callable[[], object]) -> float:
    """Seconds of this thread's CPU, without the collection of other tests' garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        began = time.thread_time()
        run()
        return time.thread_time() - began
    finally:
        if was_enabled:
            gc.enable()


def expect_cost_in_proportion(prepare: Callable[[int], Callable[[], object]], size: int) -> None:
    """Checks that the work for `size` takes at most 24 times as long as the work for an eighth of it.

    Time in proportion to the size would be 8 times as long, time in proportion to its square 64 times.
    `prepare(size)` returns the work.
    """
    small_s = whole_s = float("inf")
    for _ in range(TRIES):
        small_s = min(small_s, thread_s(prepare(size // STEPS)))
        whole_s = min(whole_s, thread_s(prepare(size)))
        if whole_s < 3 * STEPS * small_s + 1e-3:
            return
    raise AssertionError(f"{size} take {whole_s:.3f} s, {size // STEPS} take {small_s:.3f} s")
