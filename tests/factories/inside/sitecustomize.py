"""Python imports this in every process of a fleet under test, since its folder is on their PYTHONPATH.

The workers then obey the orders of tests/factories/sabotage.py in the folder of the environment variable.
"""

import os
import sys
import threading
from pathlib import Path

is_worker = sys.orig_argv[1:4] == ["-P", "-m", "worker"] or any(
    argument.endswith("default_worker.py") for argument in sys.orig_argv
)
if is_worker:
    sys.path.append(str(Path(__file__).parents[3]))
    from tests.factories.sabotage import VARIABLE, obey

    threading.Thread(target=obey, args=(Path(os.environ[VARIABLE]),), name="sabotage", daemon=True).start()
