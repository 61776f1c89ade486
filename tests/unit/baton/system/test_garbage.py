"""Objects that exist once a process serves are excluded from garbage collection, and are freed when Python ends."""

import subprocess
import sys

PROGRAM = """
import atexit, gc
atexit.register(lambda: print(gc.get_freeze_count()))  # called last
from baton.system.garbage import settle
settle()
print(gc.get_freeze_count() > 1000)
"""

IMPORTS = """
import gc
from baton.system.garbage import imports
collected = []
gc.callbacks.append(lambda *_: collected.append(1))
with imports():
    import decimal, email.message, http.client, xml.dom.minidom
    many = [[] for _ in range(10_000)]
    print(len(collected), gc.isenabled())
print(gc.get_freeze_count() > 10_000, gc.isenabled())
others = [[] for _ in range(10_000)]
print(len(collected) > 0)
"""


def test_nothing_is_collected_during_imports() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "False", "True", "True", "True"]


def test_what_is_loaded_is_set_aside_until_the_process_ends() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "0"]
