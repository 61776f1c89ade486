"""What a process holds once it serves is no longer looked at, and is let go where Python ends."""

import subprocess
import sys

PROGRAM = """
import atexit, gc
atexit.register(lambda: print(gc.get_freeze_count()))  # called last
from baton.system.garbage import settle
settle()
print(gc.get_freeze_count() > 1000)
"""


def test_what_is_loaded_is_set_aside_until_the_process_ends() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "0"]
