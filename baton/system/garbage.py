"""Python's garbage collector in a process that must answer within milliseconds."""

import atexit
import gc


def settle() -> None:
    """Call once, after everything that lives as long as the process is loaded, and before it serves.

    A full collection visits every object. PyTorch and its dependencies create four hundred thousand: a quarter of a
    second each time, several times a second under load, and the process does nothing else meanwhile. After this call
    only later objects are visited.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # else extension modules complain about objects alive at the end
