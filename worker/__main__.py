"""`python -m worker`: where the process of a worker begins. See worker/process.py."""

import sys

from baton.system.cpus import let_openmp_sleep
from baton.system.garbage import imports

if __name__ == "__main__":
    let_openmp_sleep()
    with imports():
        from worker.process import main
    sys.exit(main())
