"""`python -m worker`: where the process of a worker begins and ends. See worker/process.py."""

import logging
import os
import threading

from baton.system.cpus import let_openmp_sleep
from baton.system.garbage import imports
from baton.system.parent import kill_group, when_closed

STDIN = 0

if __name__ == "__main__":
    serves = threading.Event()

    def on_parent_gone() -> None:
        if not serves.is_set():  # imports and kernels may take minutes
            kill_group()

    when_closed(STDIN, on_parent_gone)
    let_openmp_sleep()
    with imports():
        from worker.process import main
    code = main(on_serving=serves.set)
    logging.shutdown()
    os._exit(code)  # all threads have ended, and taking PyTorch's modules apart takes a CPU second
