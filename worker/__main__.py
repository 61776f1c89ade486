"""`python -m worker`: where the process of a worker begins and ends. See worker/process.py."""

import logging
import os

from baton.system.cpus import let_openmp_sleep
from baton.system.garbage import imports

if __name__ == "__main__":
    let_openmp_sleep()
    with imports():
        from worker.process import main
    code = main()
    logging.shutdown()
    os._exit(code)  # all threads have ended, and taking PyTorch's modules apart takes a CPU second
