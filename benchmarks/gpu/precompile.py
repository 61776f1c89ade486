"""Compiles kernels by launching them in several processes.

Triton stores them on disk, where all processes find them.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.gpu.setting import Setting

PROCESSES = multiprocessing.get_context("fork")
MAX_PROCESSES = 8
"""Most processes at once. Each needs a context on the device (some 0.5 GiB), besides the memory of its
launches."""


def precompile(setting: Setting, works: Sequence[Callable[[], object]], until: float) -> None:
    """Calls each of `works` in one of several processes, at most until `until`.

    As many processes run at once as there are cores, but at most MAX_PROCESSES. Call this before the process touches
    the device: afterwards the process must not be forked. Errors and timeouts are ignored here, since the launch will
    fail again in the caller.
    """
    assert not torch.cuda.is_initialized(), "a process that uses the device cannot be forked"
    next_work = PROCESSES.Value("i", 0)
    num_processes = 2 if setting.is_dry else min(MAX_PROCESSES, os.cpu_count() or 1, len(works))

    def run() -> None:
        while True:
            with next_work.get_lock():
                number = next_work.value
                next_work.value += 1
            if number >= len(works):
                return
            try:
                works[number]()
            except Exception as error:  # any error; the caller's own launch will report it
                print(f"  compiling: {type(error).__name__}: {str(error).splitlines()[0][:160]}", flush=True)
            if not setting.is_dry:
                torch.cuda.synchronize()  # raises, and so ends this process, if the device has failed
                torch.cuda.empty_cache()

    processes = [PROCESSES.Process(target=run, daemon=True) for _ in range(num_processes)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
        process.kill()  # no effect if the process has ended
        process.join()
