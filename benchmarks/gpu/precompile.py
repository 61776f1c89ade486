"""Compiles kernels by launching them in several processes; Triton keeps them on disk for all."""

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.gpu.setting import Setting

PROCESSES = multiprocessing.get_context("fork")
MAX_PROCESSES = 8
"""Each has a context on the device, some 0.5 GiB, besides its launches' memory."""


def precompile(setting: Setting, works: Sequence[Callable[[], object]], until: float) -> None:
    """Calls each of `works` in one of several processes, as many at once as there are cores; no longer than `until`.

    For a process that has not touched the device yet: one that has cannot be forked. What fails here, by an error or by
    time, says nothing: it will fail again where its result is wanted.
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
            except Exception as error:  # of any kind; the caller's own launch will report it
                print(f"  compiling: {type(error).__name__}: {str(error).splitlines()[0][:160]}", flush=True)
            if not setting.is_dry:
                torch.cuda.synchronize()  # raises, and so ends this process, if the device is lost to it
                torch.cuda.empty_cache()

    processes = [PROCESSES.Process(target=run, daemon=True) for _ in range(num_processes)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
        process.kill()  # nothing, if it has ended
        process.join()
